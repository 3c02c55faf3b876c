"""The engine on the kernels: the text of the reference, whatever is drafted, whoever comes and goes, and nothing is left."""

from __future__ import annotations

import copy
import functools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headstart import errors
from headstart.core import PENDING, Batch, Request, Segment
from headstart.delivery import Delivery
from headstart.drafters import model
from headstart.engine import Engine, StepFailed
from headstart.models import fused, kernel_runner, packing, paged, pinned
from headstart.models.fused import FusedModel
from headstart.models.graphs import Graph
from headstart.models.kernel_runner import KernelRunner
from headstart.models.kernels import choose
from headstart.models.packing import Shape
from headstart.models.paged import Device
from headstart.models.runner import TorchRunner
from headstart.policy.fixed import FixedPolicy
from tests import tiny
from tests.harness import engine, request, run
from tests.interpreted.support import assert_close

VOCAB = 97
SMALL = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    vocab_size=VOCAB,
)  # fmt: skip
FLAT = SMALL | {"num_hidden_layers": 1}
LAYERS = dict(layer_types=["sliding_attention", "full_attention"])
OWN: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": FLAT,
    "qwen3": FLAT,
    "mistral+window": FLAT,
    "gemma2": SMALL | LAYERS,
    "gpt_oss": SMALL | LAYERS | {"num_local_experts": 2},
    "gpt2": dict(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCAB),
}
FAMILY = ("llama", "qwen2", "qwen3", "mistral+window")
ONE = "qwen2"  # with a single layer: the one for tests that are not about the model
NAMES = (*FAMILY, "gemma2", "gpt_oss", "gpt2")
SPECULATIVE: dict[str, Any] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "oracle": {"method": "tests.tiny.Oracle", "num_draft_nodes": 12},
}
PROMPTS = [[7, 8, 9, 7, 8], [11, 12, 13, 14, 11, 12, 13, 14, 11], [*range(30, 37), *range(30, 35)]]
PARAMS = [dict(temperature=0.0), dict(temperature=1.0), dict(temperature=1.0)]


@functools.cache
def _made(name: str, seed: int, more: tuple[tuple[str, Any], ...]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    options = copy.deepcopy(tiny.CONFIGS[name]) | OWN[name] | dict(more)
    config = AutoConfig.for_model(name.split("+")[0], **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def small(name: str = ONE, seed: int = 0, **more: Any) -> Any:
    """A model that is tiny even among the tiny ones."""
    return copy.deepcopy(_made(name, seed, tuple(more.items())))


def noisy() -> Any:
    """A draft that mostly agrees with `small()`."""
    out = small()
    torch.manual_seed(9)
    with torch.no_grad():
        for p in out.parameters():
            p.mul_(1 + 0.05 * torch.randn_like(p))
    return out


@pytest.fixture(autouse=True)
def _small_device(monkeypatch) -> None:
    """Few processors, so that work is cut into few programs."""
    monkeypatch.setattr(kernel_runner, "device_limits", lambda device: Device(2, 1 << 16))


class Watch:
    """Every step of an engine, watched: placeholders stay inside it, and what it tells is noted."""

    def __init__(self, e: Engine) -> None:
        self.engine, self.step, self.forward = e, e.step, e.runner.forward
        self.told: dict[str, list[int]] = {}
        self.ahead = 0  # forwards launched on tokens that the host did not know
        e.step, e.runner.forward = self._step, self._forward  # type: ignore[method-assign]

    def _step(self):
        out = self.step()
        scheduler = self.engine.scheduler
        for r, chunk in out:
            self.told.setdefault(r.id, []).extend(chunk.token_ids)
        for r in [*scheduler.running, *scheduler.waiting, *(r for r, _ in out)]:
            assert PENDING not in r.tokens
        return out

    def _forward(self, batch: Batch):
        self.ahead += batch.source is not None and bool((batch.source >= 0).any())
        return self.forward(batch)


def requests(
    prompts: list[list[int]] = PROMPTS, params: list[dict] = PARAMS, max_tokens: int = 6, eos: int | None = None
) -> list[Request]:
    options = [dict(max_tokens=max_tokens) | p for p in params]
    return [request(p, seed=i, eos=eos, **options[i]) for i, p in enumerate(prompts)]


@functools.cache
def wanted(name: str = ONE, max_tokens: int = 6) -> list[list[int]]:
    """What the reference runner says."""
    return run(engine(TorchRunner(small(name))), requests(max_tokens=max_tokens))


def knowing(name: str = ONE) -> None:
    tiny.Oracle.known = {tuple(p): w for p, w in zip(PROMPTS, wanted(name), strict=True)}


# ------------------------------------------------------------------ the same text
@pytest.mark.parametrize("how", SPECULATIVE)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_reference(name: str, how: str) -> None:
    """Greedy and sampled requests in one batch, one joining every other step."""
    knowing(name)
    e = engine(small(name), SPECULATIVE[how])
    assert type(e.runner) is KernelRunner and isinstance(e.runner.lean, FusedModel) == (name in FAMILY)
    watch, rs = Watch(e), requests()
    assert run(e, rs, arrivals=2) == wanted(name)
    assert [watch.told[r.id] for r in rs] == wanted(name)
    assert watch.ahead > 0 or how != "none"
    assert sum(r.stats.accepted for r in rs) > 0 or how != "oracle"
    assert sum(r.stats.drafted for r in rs) > 0 or how == "none"


def test_a_draft_model_grows_trees_through_the_kernels() -> None:
    spec = {"method": "draft_model", "num_speculative_tokens": 2, "tree": True, "num_draft_nodes": 5, "p_split": 0.02}
    e, rs = engine(small(), spec, small()), requests(PROMPTS[:2], max_tokens=5)
    assert type(next(iter(e.drafting.drafters.values())).runner) is KernelRunner
    assert run(e, rs) == [w[:5] for w in wanted()[:2]]
    assert sum(r.stats.accepted for r in rs) > 3


@pytest.mark.parametrize(("name", "layers", "tree"), [("llama", 2, False), ("llama", 1, True), ("gemma2", 1, True)])
def test_the_first_layers_draft_through_the_kernels(name: str, layers: int, tree: bool) -> None:
    """Those of fused models and of others: they draft what the reference drafts, and all layers foresee every token."""
    spec = {"method": "early_exit", "num_speculative_tokens": 2, "exit_layer": layers, "tree": tree, "p_split": 0.02}
    drafts = []
    for runner in (TorchRunner(small(name)), small(name)):
        rs = requests(PROMPTS[:2], max_tokens=5)
        assert run(engine(runner, spec), rs) == [w[:5] for w in wanted(name)[:2]]
        drafts.append([(r.stats.drafted, r.stats.accepted) for r in rs])
    assert drafts[0] == drafts[1] and sum(d for d, _ in drafts[0]) > 0
    assert layers == 1 or all(drafted == accepted for drafted, accepted in drafts[1])


CHAIN = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.mark.parametrize("how", ["by mail", "waiting", "waiting, after several forwards"])
def test_a_draft_model_runs_ahead_in_chains_and_drafts_the_same(how: str, monkeypatch) -> None:
    """The target finds the tokens on the device, unless the first look at the prompts took several forwards."""
    monkeypatch.setattr(model, "MAX_BATCH_TOKENS", 8 if "several" in how else 512)
    with monkeypatch.context() as patch:
        patch.setattr(model, "make_runner", lambda made, fuse, kernels: TorchRunner(made))
        reference = engine(TorchRunner(small()), CHAIN, draft=noisy())
    kernels = engine(small(), CHAIN, draft=noisy())
    drafter, mails = kernels.drafting.drafters["draft_model"], []
    drafter.around.takes_mail = how == "by mail"
    assert drafter.straight and not reference.drafting.drafters["draft_model"].straight
    forward = kernels.runner.forward
    kernels.runner.forward = lambda batch: (mails.append(batch.mail is not None), forward(batch))[1]
    Watch(kernels)
    drafts = []
    for e in (reference, kernels):
        rs = requests(max_tokens=5)
        assert run(e, rs) == [w[:5] for w in wanted()]
        drafts.append([(r.stats.drafted, r.stats.accepted) for r in rs])
    assert drafts[0] == drafts[1] and 0 < sum(a for _, a in drafts[0]) < sum(d for d, _ in drafts[0])
    assert any(mails) == (how == "by mail") and not drafter.pool.tables and not drafter._memory


def test_a_text_that_is_too_long_for_the_draft_model_goes_on_beside_one_that_is_not() -> None:
    e = engine(small(), CHAIN, draft=noisy())
    e.drafting.drafters["draft_model"].max_len = 9
    rs = requests(max_tokens=5)
    assert run(e, rs) == [w[:5] for w in wanted()]
    assert rs[0].stats.drafted > 0 and rs[2].stats.drafted == 0


def test_a_request_is_cancelled_while_its_draft_is_in_the_mail() -> None:
    e = engine(small(), CHAIN, draft=noisy())
    for r in (rs := requests(PROMPTS[:2], max_tokens=5)):
        e.add(r)
    for _ in range(2):
        e.step()
    assert e._flight is not None and e._flight.drafted.mail
    e.abort(rs[0])
    run(e, [])
    drafter = e.drafting.drafters["draft_model"]
    assert rs[1].output == wanted()[1][:5] and not drafter.pool.tables and not drafter._memory


def test_many_rows_take_library_products_and_say_the_same() -> None:
    e = engine(small("qwen3"))
    e.runner.lean.widest_few = 3
    assert run(e, requests()) == wanted("qwen3")


def test_mail_reaches_library_products_too() -> None:
    """The walk has to see the tokens that the target found in the mail, whichever way it computed."""
    accepted = []
    for few in (64, 0):
        e = engine(small(), CHAIN, draft=noisy())
        e.runner.lean.widest_few = few
        rs = requests(max_tokens=5)
        assert run(e, rs) == [w[:5] for w in wanted()]
        accepted.append(sum(r.stats.accepted for r in rs))
    assert accepted[0] == accepted[1] > 0


@pytest.mark.parametrize("how", ["none", "oracle"])
def test_prefill_in_pieces_under_memory_pressure(how: str) -> None:
    """With 6 pages of 4 tokens for texts of up to 18: someone has to step aside."""
    knowing()
    e = engine(small(), SPECULATIVE[how], pages=6, max_batch_tokens=8)
    Watch(e)
    rs = requests()
    assert run(e, rs) == wanted()
    assert how != "none" or sum(r.stats.preemptions for r in rs) > 0


@pytest.mark.parametrize("how", ["none", "ngram", "oracle", "rejection"])
def test_the_host_chooses_beside_the_device(how: str) -> None:
    """Logprobs, a penalty, typical-p, min_tokens and top-p in one batch: some of it is chosen on the device."""
    spec = {**SPECULATIVE["ngram"], "verification": "rejection"} if how == "rejection" else SPECULATIVE[how]
    params = [
        dict(temperature=1.0, logprobs=2, prompt_logprobs=1),
        dict(temperature=0.0, repetition_penalty=1.5),
        dict(temperature=1.0, typical_p=0.7),
        dict(temperature=1.0, top_p=0.7, min_tokens=3),
    ]
    prompts = [*PROMPTS, [5, 6, 5, 6]]
    theirs, ours = (requests(prompts, params, max_tokens=7) for _ in range(2))
    want = run(engine(TorchRunner(small()), spec if how == "rejection" else None), theirs)
    tiny.Oracle.known = {tuple(p): w for p, w in zip(prompts, want, strict=True)}
    e = engine(small(), spec)
    Watch(e)
    assert run(e, ours) == want
    assert how != "oracle" or all(r.stats.accepted > 1 for r in ours)
    for name in ("logprobs", "prompt_logprobs"):
        mine, other = ([x for x in getattr(r[0], name) if x] for r in (ours, theirs))
        assert [x.token for x in mine] == [x.token for x in other] and mine
        assert [x.logprob for x in mine] == pytest.approx([x.logprob for x in other], abs=1e-4)
        assert [list(x.top) for x in mine] == [list(x.top) for x in other]


class Slow(FixedPolicy):
    """Learns for long, if it is given the time."""

    times = 0

    def catch_up(self, coming: Request | None = None) -> None:
        self.times += 1
        time.sleep(0.01)


@pytest.mark.parametrize("late", [True, False])
def test_what_is_learned_while_the_device_is_at_work_counts_only_where_it_has_to_wait(late: bool, monkeypatch) -> None:
    e = engine(KernelRunner(small()))
    policy = e.policy = Slow(e.drafting.config, e.drafting.choices)
    # whether the device is done, each time that somebody asks: late, with one step while the policy learns, and with the next
    # before it has got another
    done: list[bool] = []
    landed = property(lambda landing: done.append(late and len(done) % 3 > 0) or done[-1])
    monkeypatch.setattr(pinned.PinnedLanding, "has_landed", landed)
    run(e, [request(PROMPTS[0], max_tokens=10)])
    took = 0.01 * policy.times
    assert policy.times >= 4
    assert (e.seconds["policy"] >= took) == late and (e.aside >= took) == (not late)
    assert e.seconds["target"] >= 0


@pytest.mark.parametrize("how", ["none", "oracle"])
def test_a_question_that_the_device_hands_back_is_answered_by_the_host(how: str, monkeypatch) -> None:
    """With a short list of 8 tokens, top-p often reaches beyond it; the others of the batch do not notice."""
    monkeypatch.setattr(choose, "SHORTLIST", 8)
    params = [dict(temperature=0.8, top_p=0.9), dict(temperature=1.0), dict(temperature=0.8, top_k=5, min_p=0.01)]
    want = run(engine(TorchRunner(small())), requests(params=params))
    tiny.Oracle.known = {tuple(p): w for p, w in zip(PROMPTS, want, strict=True)}
    e, answered = engine(small(), SPECULATIVE[how]), []
    verify = e._verify
    e._verify = lambda flight: (verify(flight), answered.extend(flight.chosen))[0]
    Watch(e)
    assert run(e, requests(params=params)) == want
    assert True in answered and False in answered


# ------------------------------------------------------------------ one step behind another
@pytest.mark.parametrize("why", ["eos", "stop token", "stop string", "length"])
def test_a_request_ends_while_the_next_step_is_on_its_way(why: str) -> None:
    want = wanted()
    at = next(i for i in range(2, 6) if want[0][i] not in want[0][:i])
    last = want[0][at]
    rs = requests(PROMPTS[:2], eos=last if why == "eos" else None)
    own = {"stop token": dict(stop_token_ids=[last]), "stop string": dict(stop=[chr(1000 + last)])}
    own |= {"length": dict(max_tokens=at + 1)}
    if why in own:
        rs[0] = request(PROMPTS[0], seed=0, eos=None, **dict(max_tokens=6) | own[why])
    e = engine(small())
    e.delivery = Delivery(lambda ids, skip: "".join(chr(1000 + t) for t in ids))
    watch, ended = Watch(e), []
    watched = e.step

    def step():
        out = watched()
        ended.extend((r, e._flight is not None) for r, chunk in out if chunk.finish_reason)
        return out

    e.step = step
    outs = run(e, rs)
    assert outs[0] == want[0][: at + 1]
    assert rs[0].finish_reason == ("length" if why == "length" else "stop")
    assert rs[0].stop_reason == {"stop token": last, "stop string": chr(1000 + last)}.get(why)
    assert outs[1] == (want[1] if why != "eos" or last not in want[1] else want[1][: want[1].index(last) + 1])
    assert [watch.told[r.id] for r in rs] == outs and not any(PENDING in r.tokens for r in rs)
    assert watch.ahead > 0 and (rs[0], True) in ended, "no other step was on its way: this test would prove nothing"
    assert not e.delivery.streams


@pytest.mark.parametrize("how", ["none", "oracle"])
def test_a_request_is_cancelled_in_mid_flight(how: str) -> None:
    knowing()
    e = engine(small(), SPECULATIVE[how])
    watch, rs = Watch(e), requests()
    for r in rs:
        e.add(r)
    for _ in range(2):
        e.step()
    assert e._flight is not None
    e.abort(rs[1])
    e.check_integrity()
    assert rs[1].finish_reason == "abort" and rs[1].id not in e.pool.tables and PENDING not in rs[1].tokens
    assert rs[1].output == wanted()[1][: rs[1].num_output]
    outs = run(e, [])
    assert (outs, [rs[0].output, rs[2].output]) == ([], [wanted()[0], wanted()[2]])
    assert watch.told[rs[1].id] == rs[1].output


def test_all_requests_are_cancelled_in_mid_flight() -> None:
    e = engine(small())
    rs = requests()[:2]
    for r in rs:
        e.add(r)
    for _ in range(3):
        e.step()
    for r in rs:
        e.abort(r)
    assert not e.idle  # a forward is still on its way
    assert e.step() == [] and e.idle and e.pool.num_used == 0


class Diary(tiny.RandomTrees):
    """Notes what it is told, in order."""

    def observe(self, view, trees, verdicts):
        self.notes += [("observe", r.id) for r in view.requests]

    def release(self, request):
        self.notes.append(("release", request.id))

    notes: list[tuple[str, str]] = []  # noqa: RUF012


def test_a_drafter_hears_nothing_of_a_request_that_is_over(monkeypatch) -> None:
    monkeypatch.setattr(Diary, "notes", [])
    e = engine(small(), {"method": f"{__name__}.Diary", "num_draft_nodes": 3})
    for r in (rs := requests(PROMPTS[:2], PARAMS[:1] * 2)):
        e.add(r)
    for _ in range(2):
        e.step()
    e.abort(rs[0])
    run(e, [])
    mine = [what for what, who in Diary.notes if who == rs[0].id]
    assert mine[-1] == "release" and "observe" in mine


def test_a_failed_forward_behind_another_leaves_nothing_behind() -> None:
    e = engine(small())
    for r in (rs := requests()[:2]):
        e.add(r)
    for _ in range(2):
        e.step()
    forward, again = e.runner.forward, e.runner.again
    e.runner.forward = e.runner.again = lambda batch: 1 / 0
    e.step()  # they start over, each by itself
    for r in rs:
        with pytest.raises(StepFailed) as caught:
            e.step()
        assert caught.value.requests == [r] and PENDING not in r.tokens
        e.abort(r)
        e.check_integrity()
    assert e.idle and e.pool.num_used == 0
    e.runner.forward, e.runner.again = forward, again
    assert run(e, requests()[:2]) == wanted()[:2]


def test_who_waits_for_the_last_token_of_a_broken_step_is_told() -> None:
    """Its last token was on its way, so the next step does not plan it; still it has a part in what broke."""
    e, r = engine(small()), request(PROMPTS[0], eos=None, max_tokens=3)
    e.add(r)
    verify, count = e._verify, iter(range(9))

    def breaks(flight):
        if next(count) == 2:
            raise ValueError("broken")
        return verify(flight)

    e._verify = breaks
    with pytest.raises(StepFailed) as failure:
        while not e.idle:
            e.step()
    assert failure.value.requests == [r]
    e.abort(r)
    assert e.idle and not e.pool.tables and PENDING not in r.tokens


def test_an_engine_is_not_idle_until_everything_is_told() -> None:
    e = engine(small())
    told: dict[str, list[int]] = {}
    ends: set[str] = set()
    for r in (rs := requests()[:2]):
        e.add(r)
    while not e.idle:
        assert len(ends) < 2, "nothing is left to tell, and the engine is not idle"
        for r, chunk in e.step():
            told.setdefault(r.id, []).extend(chunk.token_ids)
            ends |= {r.id} if chunk.finish_reason else set()
    assert ends == {r.id for r in rs} and [told[r.id] for r in rs] == wanted()[:2]


# ------------------------------------------------------------------ deterministic
def test_deterministic_text_does_not_depend_on_drafts(monkeypatch) -> None:
    monkeypatch.setattr(paged, "DETERMINISTIC_SPLITS", 2)
    plain = run(engine(small(), deterministic=True), requests()[:2])
    rs = requests()[:2]
    assert run(engine(small(), SPECULATIVE["ngram"], deterministic=True), rs) == plain == wanted()[:2]
    assert sum(r.stats.drafted for r in rs) > 0


def test_deterministic_logits_do_not_depend_on_the_batch() -> None:
    """A token in a prefill piece, in a chain and alone, among others and by itself: the same bits."""
    tokens = np.array([7, 8, 9, 10, 11, 12])

    def logits(pieces: list[int], beside: int) -> torch.Tensor:
        runner = KernelRunner(small(), deterministic=True)
        runner.allocate(64, 4, 64, 8)
        out, done = [], 0
        for n in pieces:
            mine = Segment(beside, beside + n, done, np.arange(done + n) + 8)
            other = [Segment(0, beside, 0, np.arange(beside) + 40)] if beside else []
            ids = np.concatenate([np.arange(beside) + 50, tokens[done : done + n]])
            positions = np.concatenate([np.arange(beside), np.arange(done, done + n)])
            batch = Batch(ids, positions, [*other, mine], np.arange(beside, beside + n))
            out.append(runner.forward(batch).logits.clone())
            done += n
        return torch.cat(out)

    whole = logits([6], 0)
    for pieces, beside in (([4, 1, 1], 0), ([6], 19), ([1, 5], 3)):
        assert torch.equal(logits(pieces, beside), whole), f"pieces {pieces} beside {beside} rows"


def test_deterministic_needs_the_family() -> None:
    with pytest.raises(errors.ConfigError, match="fuse"):
        engine(small("gpt2"), deterministic=True)
    with pytest.raises(errors.ConfigError, match="fuse"):
        engine(small(), fuse=False, deterministic=True)


# ------------------------------------------------------------------ one forward
def forwards(name: str, batch: Batch, fuse: bool = True, **more: Any) -> tuple[Any, Any]:
    out = []
    for made in (TorchRunner, KernelRunner):
        runner = made(small(name, **more), fuse=fuse)
        runner.allocate(64, 4, 64, 8)
        out.append(runner.forward(batch))
    return out[0], out[1]


def prompt_batch(rows: list[int], hidden: tuple[int, ...] = ()) -> Batch:
    segments = [Segment(0, 5, 0, np.arange(5) + 8), Segment(5, 8, 0, np.arange(3) + 20)]
    return Batch(np.arange(8) + 3, np.array([0, 1, 2, 3, 4, 0, 1, 2]), segments, np.array(rows), hidden)


@pytest.mark.parametrize("few", [64, 0])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_and_hidden_states_are_those_of_the_reference(name: str, few: int, monkeypatch) -> None:
    monkeypatch.setattr(fused, "FEW", few)
    for rows in ([4, 7], list(range(8))):
        want, got = forwards(name, prompt_batch(rows, (0, 1, 2)), num_hidden_layers=2)
        assert_close(got.logits, want.logits)
        assert list(got.hidden) == [0, 1, 2]
        for layer in (0, 1, 2):
            assert_close(got.hidden[layer], want.hidden[layer])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_model_can_keep_its_own_forward(name: str) -> None:
    want, got = forwards(name, prompt_batch([4, 7]), fuse=False)
    assert_close(got.logits, want.logits)


def test_layers_with_heads_of_different_sizes_have_pools_of_their_own() -> None:
    runner = KernelRunner(small("llama"))
    runner.shapes[1].value_dim = 24
    runner.allocate(16, 4, 8, 2)
    assert [p.shape for p in runner.pools] == [(1, 16, 1, 16)] * 3 + [(1, 16, 1, 24)]
    assert runner.values[1].data_ptr() == runner.pools[3].data_ptr()


# ------------------------------------------------------------------ sizes
@pytest.mark.parametrize("dim", [24, 64, 80, 96, 100])
def test_heads_of_any_size(dim: int) -> None:
    want, got = forwards("llama", prompt_batch([4, 7]), head_dim=dim, num_hidden_layers=1)
    assert_close(got.logits, want.logits)


def test_a_long_piece_beside_as_many_requests_as_there_may_be() -> None:
    segments = [Segment(i, i + 1, 1, np.arange(2) + 4 * i) for i in range(63)]
    segments.append(Segment(63, 128, 0, np.arange(65) + 256))
    positions = np.array([1] * 63 + list(range(65)))
    batch = Batch(np.arange(128) % VOCAB, positions, segments, np.array([3, 127]))
    more = dict(hidden_size=56, num_attention_heads=7, head_dim=8, num_hidden_layers=1)
    out = []
    for made in (TorchRunner, KernelRunner):
        runner = made(small(**more))
        runner.allocate(400, 4, 128, 64)
        out.append(runner.forward(batch).logits)
    assert_close(out[1], out[0])


@pytest.mark.parametrize(("rows", "most"), [(33, (40, 1)), (20, (24, 2)), (5, (6, 1)), (2, (2, 1))])
def test_a_padded_batch_finds_its_room(rows: int, most: tuple[int, int]) -> None:
    """The shape that a graph would be captured for, on a runner with room for few rows and requests."""
    runner = KernelRunner(small(num_hidden_layers=1))
    runner.allocate(64, 4, *most)
    batch = Batch(np.arange(rows), np.arange(rows), [Segment(0, rows, 0, np.arange(rows))], np.arange(rows))
    want = runner.forward(batch).logits.clone()
    shape = Shape.of(batch).padded()
    block = np.zeros(packing.size_of(shape, batch, 4), np.int32)
    packing.fill(block, shape, batch, 4)
    with torch.inference_mode():
        logits, _ = runner._run(torch.from_numpy(block), shape, None, ())
    assert_close(logits[:rows], want)


class Recorded(KernelRunner):
    """Its graphs are runs of the same kernels over the same block, so that a CPU can have some."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.graphs_allowed = True
        self.played: list[Shape] = []

    def _graph(self, shape: Shape, taps: tuple[int, ...], layers: int | None = None) -> Graph | None:
        if (shape, taps, layers) not in self.graphs:
            kept = {layer: self._tapped(layer)[: shape.rows] for layer in taps}
            logits = torch.zeros(shape.rows, self.vocab_size)

            def replay() -> None:
                self.played.append(shape)
                found, hidden = self._run(self.block, shape, None, taps, layers)
                logits.copy_(found)
                for layer, h in hidden.items():
                    kept[layer].copy_(h)

            left = self._leave(self.block, kept, fixed=True)
            self.graphs[shape, taps, layers] = Graph([SimpleNamespace(replay=replay)], logits, kept, left)
        return self.graphs[shape, taps, layers]


@pytest.mark.parametrize("how", ["ngram", "oracle"])
def test_a_larger_graph_stands_in_for_one_that_is_not_there(how: str, monkeypatch) -> None:
    """And gives the same texts. Once it was met often, it gets one of its own."""
    monkeypatch.setattr(kernel_runner, "OFTEN", 1)
    monkeypatch.setattr(kernel_runner, "_graph_rows", lambda device, vocab, rows: rows)

    def ask() -> list[Request]:
        return [request(p, max_tokens=12, temperature=0.0) for p in PROMPTS]

    want = run(engine(TorchRunner(small())), ask())
    tiny.Oracle.known = {tuple(p): w for p, w in zip(PROMPTS, want, strict=True)}
    e = engine(runner := Recorded(small()), SPECULATIVE[how])
    runner.improvises, width = True, 16 * (how == "oracle")
    own, *ready = (Shape(rows, 4 * rows // 16, max(8, width), width) for rows in (16, 32, 64))
    for shape in ready:
        runner._graph(shape, (0,))
    assert run(e, ask()) == want
    assert ready[0] in runner.played and own not in runner.played
    assert run(e, ask()) == want
    assert own in runner.played


def test_no_smaller_graph_stands_in_and_none_while_all_is_made_ready(monkeypatch) -> None:
    monkeypatch.setattr(kernel_runner, "_graph_rows", lambda device, vocab, rows: rows)
    runner = Recorded(small())
    runner.allocate(64, 4, 64, 4)
    step, wide = (Shape(16, 2, 8, 0), (), None), (Shape(32, 4, 8, 0), (1,), None)
    runner._graph(wide[0], wide[1])
    assert runner._at_hand(step) == step, "it is made when it is first met"
    runner.improvises = True
    assert runner._at_hand(step) == wide
    for other in (
        (Shape(16, 2, 16, 0), (), None),
        (Shape(16, 2, 8, 16), (), None),
        (Shape(8, 2, 8, 0), (), None),
        (Shape(16, 2, 8, 0), (2,), None),
        (Shape(16, 2, 8, 0), (), 1),
        (Shape(16, 2, 8, 0, prompts=True), (), None),
    ):
        assert runner._at_hand(other) == other


ROPES = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 128, "factor": 4.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_angles_are_those_that_the_model_uses_within_its_length(kind: str) -> None:
    """Making a table of all positions must not push the model over the length at which its angles change."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = {"rope_type": kind, "rope_theta": 10000.0} | ROPES[kind]
    options = copy.deepcopy(tiny.CONFIGS["llama"]) | OWN["llama"]
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **options | dict(max_position_embeddings=512, rope_parameters=rope))
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    batch = Batch(np.arange(30) % VOCAB, np.arange(30), [Segment(0, 30, 0, np.arange(30))], np.array([29]))
    out = []
    for runner in (TorchRunner(copy.deepcopy(made)), KernelRunner(copy.deepcopy(made))):
        runner.allocate(1024, 4, 64, 8)
        out.append(runner.forward(batch).logits)
    assert_close(out[1], out[0])
