"""The engine on tiny models: the text depends on prompt, parameters and seed, and on nothing else."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headstart.core import Batch, Draft, Request, Segment, Tree
from headstart.drafters import Drafter, register
from headstart.engine import Clock, StepFailed
from headstart.errors import BadInput, ConfigError
from headstart.models.runner import TorchRunner
from headstart.scheduler import GROWS
from tests import tiny
from tests.harness import engine, generate, request, run
from tests.test_architectures import SPECULATIVE

SAMPLED = dict(temperature=1.0, max_tokens=30)


@functools.cache
def sampled(count: int = 16, **params: Any) -> list[list[int]]:
    """What plain decoding says, one request at a time."""
    e = engine(tiny.model())
    options = SAMPLED | params
    return [run(e, [request(p, seed=i, **options)])[0] for i, p in enumerate(tiny.prompts(count))]


def speculating(how: str, **config: Any):
    prompts = tiny.prompts(16)
    tiny.Oracle.known = {tuple(p): w for p, w in zip(prompts, sampled(), strict=True)}
    draft = tiny.noisy() if SPECULATIVE[how] and SPECULATIVE[how]["method"] == "draft_model" else None
    return engine(tiny.model(), SPECULATIVE[how], draft, max_num_seqs=16, **config)


# ------------------------------------------------------------------ same seed, same text
@pytest.mark.parametrize("how", SPECULATIVE)
def test_seeded_sampling_does_not_depend_on_drafter_or_batch(how: str) -> None:
    prompts = tiny.prompts(16)
    e = speculating(how)
    alone = [run(e, [request(p, seed=i, **SAMPLED)])[0] for i, p in enumerate(prompts[:4])]
    assert alone == sampled()[:4]
    requests = [request(p, seed=i, **SAMPLED) for i, p in enumerate(prompts)]
    assert run(e, requests) == sampled()
    if how in ("oracle", "chain", "tree"):
        assert sum(r.stats.accepted for r in requests) > 50


def test_seeds_differ() -> None:
    prompt = tiny.prompts(1)[0]
    texts = {tuple(run(engine(tiny.model()), [request(prompt, seed=s, **SAMPLED)])[0]) for s in range(8)}
    assert len(texts) == 8


EVERYTHING = {
    "top_k": dict(top_k=7),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.05),
    "typical_p": dict(typical_p=0.7),
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.8, frequency_penalty=0.5),
    "bias": dict(logit_bias={9: 4.0, 12: -100.0}),
    "min_tokens": dict(min_tokens=20, logit_bias={0: 8.0}),
    "ignore_eos": dict(ignore_eos=True, logit_bias={0: 3.0}),
    "stop_token": dict(stop_token_ids=tuple(range(40, 60))),
    "all": dict(top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.2, temperature=0.7),
    "greedy penalties": dict(temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0),
}


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("how", ["ngram", "tree", "oracle", "random"])
def test_every_parameter_is_exact_under_speculation(how: str, name: str) -> None:
    params = EVERYTHING[name]
    prompts = tiny.prompts(6)
    plain = engine(tiny.model())
    want = [run(plain, [request(p, seed=i, **SAMPLED | params)])[0] for i, p in enumerate(prompts)]
    e = speculating(how)
    tiny.Oracle.known = {tuple(p): w for p, w in zip(prompts, want, strict=True)}
    requests = [request(p, seed=i, **SAMPLED | params) for i, p in enumerate(prompts)]
    assert run(e, requests) == want
    if how == "oracle":
        assert sum(r.stats.accepted for r in requests) > 5


def test_bad_words_inside_a_block() -> None:
    """A two-token bad word is avoided also when the drafter proposes it in one block."""
    prompt = tiny.prompts(2)[1]
    want = run(engine(tiny.model()), [request(prompt)])[0]
    bad = (tuple(want[3:5]),)

    def bad_request() -> Request:
        r = request(prompt)
        r.bad_word_ids = bad
        return r

    plain = run(engine(tiny.model()), [bad_request()])[0]
    assert plain[:4] == want[:4] and plain[4] != want[4]
    tiny.Oracle.known = {tuple(prompt): want}
    assert run(engine(tiny.model(), SPECULATIVE["oracle"]), [bad_request()])[0] == plain


# ------------------------------------------------------------------ hostile drafters
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("who", tiny.HOSTILE)
def test_hostile_drafters_never_change_the_text(who: str, temperature: float, capsys) -> None:
    prompts = tiny.prompts(4)
    options = SAMPLED | {"temperature": temperature}
    plain = engine(tiny.model())
    want = [run(plain, [request(p, seed=i, **options)])[0] for i, p in enumerate(prompts)]
    e = engine(tiny.model(), {"method": tiny.HOSTILE[who], "num_draft_nodes": 6})
    requests = [request(p, seed=i, **options) for i, p in enumerate(prompts)]
    assert run(e, requests) == want
    assert all(r.stats.drafted <= 6 * r.stats.steps for r in requests)
    said = capsys.readouterr().err
    assert (who in ("NoTree", "Raises", "TooFew", "ObserveRaises", "ReleaseRaises")) == ("go on without drafts" in said)


# ------------------------------------------------------------------ batching
def test_requests_join_and_leave_at_any_step() -> None:
    prompts = tiny.prompts(16)
    for how in ("none", "tree", "oracle"):
        e = speculating(how)
        assert run(e, [request(p, seed=i, **SAMPLED) for i, p in enumerate(prompts)], arrivals=2) == sampled()


@pytest.mark.parametrize("how", ["none", "ngram", "tree", "oracle"])
def test_memory_pressure_preempts_and_resumes_without_losing_a_token(how: str) -> None:
    prompts = tiny.prompts(16)
    e = speculating(how, pages=30)  # 120 slots for 16 requests of up to 70 tokens
    requests = [request(p, seed=i, **SAMPLED) for i, p in enumerate(prompts)]
    assert run(e, requests) == sampled()
    assert sum(r.stats.preemptions for r in requests) > 0


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_prefill_in_pieces(size: int) -> None:
    prompts = tiny.prompts(8)
    e = engine(tiny.model(), max_batch_tokens=size)
    assert run(e, [request(p, seed=i, **SAMPLED) for i, p in enumerate(prompts)]) == sampled()[:8]


def test_one_batch_mixes_drafters_and_parameters() -> None:
    prompts = tiny.prompts(8)
    e = engine(tiny.model(), SPECULATIVE["tree"], tiny.noisy())
    own = [
        None,
        "ngram",
        "suffix",
        False,
        {"method": "draft_model", "max_tokens": 2},
        {"enabled": False},
        "ngram",
        None,
    ]
    params = [SAMPLED, {}, SAMPLED, dict(temperature=0.5, top_k=5), SAMPLED, {}, dict(temperature=1.5), {}]
    plain = engine(tiny.model())
    want = [run(plain, [request(p, seed=i, **params[i])])[0] for i, p in enumerate(prompts)]
    requests = [request(p, own[i], seed=i, **params[i]) for i, p in enumerate(prompts)]
    assert run(e, requests) == want
    assert requests[3].stats.drafted == requests[5].stats.drafted == 0
    assert requests[0].stats.drafted > 0 and set(requests[1].stats.by_drafter) <= {"ngram"}
    assert requests[4].stats.drafted <= 2 * requests[4].stats.steps


def test_a_request_cannot_choose_what_is_not_loaded() -> None:
    e = engine(tiny.model(), "ngram")
    with pytest.raises(ConfigError, match="not loaded"):
        e.add(request([5, 6], "draft_model"))
    assert e.idle


def test_cancelling_frees_at_once() -> None:
    e = engine(tiny.model(), SPECULATIVE["tree"], tiny.noisy())
    requests = [request(p, max_tokens=200) for p in tiny.prompts(8)]
    for r in requests:
        e.add(r)
    for _ in range(5):
        e.step()
    used = e.pool.num_used
    for r in requests[:4]:
        e.abort(r)
        e.check_integrity()
    assert e.pool.num_used < used and all(r.finish_reason == "abort" for r in requests[:4])
    drafter = next(iter(e.drafting.drafters.values()))
    assert set(drafter.pool.tables) <= {r.id for r in requests[4:]}
    drafter.pool.check_integrity()


# ------------------------------------------------------------------ KV
def test_a_shared_prefix_is_computed_once(monkeypatch) -> None:
    system = tiny.prompts(2)[1][:24]
    computed = []
    forward = TorchRunner.forward
    monkeypatch.setattr(TorchRunner, "forward", lambda self, b: (computed.append(len(b.tokens)), forward(self, b))[1])
    e = engine(tiny.model(), max_batch_tokens=200)
    outs = run(e, [request([*system, 30 + i], max_tokens=1, seed=i) for i in range(8)])
    assert sum(computed) == 24 + 8  # page size 4: the whole prefix is shared, within one forward even
    assert outs == [run(engine(tiny.model()), [request([*system, 30 + i], max_tokens=1)])[0] for i in range(8)]
    computed.clear()
    late = request([*system, 99], max_tokens=1)
    run(e, [late])
    assert sum(computed) == 1 and late.stats.cached_prompt_tokens == 24


def test_sharing_can_be_switched_off() -> None:
    prompt = tiny.prompts(2)[1]
    e = engine(tiny.model(), share_prefixes=False)
    run(e, [request(prompt)])
    r = request(prompt)
    run(e, [r])
    assert r.stats.cached_prompt_tokens == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_after_any_history_logits_equal_a_fresh_prefill(name: str) -> None:
    """Random trees, random verdicts: what lies in KV is what a prefill would have put there."""
    rng = np.random.default_rng(3)
    prompt = tiny.prompts(2)[1]
    e = engine(tiny.model(name), SPECULATIVE["oracle"])
    text = [int(t) for t in rng.integers(5, 200, size=120)]
    tiny.Oracle.known = {tuple(prompt): text}

    def forced(logits, rows):  # the target "chooses" a random text, sometimes what the oracle drafted
        return [text[r.position - len(prompt)] if rng.random() < 0.8 else int(rng.integers(5, 200)) for r in rows]

    r = request(prompt, max_tokens=90, eos=None)
    e.add(r)
    stock = tiny.model(name)
    from headstart import sampling

    original, sampling.choose = sampling.choose, forced
    try:
        while r.num_output < 36:
            e.step()
            tiny.Oracle.known = {tuple(prompt): r.output + text[r.num_output :]}
    finally:
        sampling.choose = original
    n = r.computed
    slots = e.pool.slots(r.id, n + 1)
    batch = Batch(np.array([17]), np.array([n]), [Segment(0, 1, n, slots)], np.array([0]))
    with torch.inference_mode():
        ours = e.runner.forward(batch).logits[0]
        fresh = stock(torch.tensor([[*r.tokens[:n], 17]], device=tiny.DEVICE), use_cache=False).logits[0, -1]
    assert r.stats.accepted > 5 and r.stats.accepted < r.stats.drafted
    torch.testing.assert_close(ours, fresh, atol=2e-4, rtol=1e-4)


# ------------------------------------------------------------------ logprobs
def test_logprobs_and_prompt_logprobs_equal_the_stock_model() -> None:
    prompts = tiny.prompts(4)
    stock = tiny.model()
    for how in ("none", "oracle", "tree"):
        e = speculating(how, max_batch_tokens=16)
        requests = [request(p, seed=i, logprobs=3, prompt_logprobs=2, **SAMPLED) for i, p in enumerate(prompts)]
        assert run(e, requests) == sampled()[:4]
        for r in requests:
            with torch.inference_mode():
                logp = stock(torch.tensor([r.tokens], device=tiny.DEVICE), use_cache=False).logits[0].log_softmax(-1)
            assert len(r.logprobs) == r.num_output and len(r.prompt_logprobs) == len(r.prompt)
            assert r.prompt_logprobs[0] is None
            entries = [*r.prompt_logprobs[1:], *r.logprobs]
            for i, entry in enumerate(entries):
                assert entry.token == r.tokens[i + 1]
                assert entry.logprob == pytest.approx(float(logp[i, entry.token]), abs=1e-4)
                top = 3 if i + 1 >= len(r.prompt) else 2
                assert list(entry.top) == logp[i].topk(top).indices.tolist()


# ------------------------------------------------------------------ rejection
@pytest.mark.parametrize("how", ["chain", "tree", "ngram"])
def test_rejection_samples_the_targets_distribution(how: str) -> None:
    """The whole engine with verification='rejection': first two tokens against the exact law, by chi-square."""
    prompt = tiny.prompts(2)[1]
    stock = tiny.model()
    params = dict(temperature=1.0, top_k=3, max_tokens=2)
    with torch.inference_mode():
        law: dict[tuple[int, int], float] = {}
        first = stock(torch.tensor([prompt], device=tiny.DEVICE), use_cache=False).logits[0, -1].topk(3)
        for a, pa in zip(first.indices.tolist(), first.values.softmax(-1).tolist(), strict=True):
            second = stock(torch.tensor([[*prompt, a]], device=tiny.DEVICE), use_cache=False).logits[0, -1].topk(3)
            for b, pb in zip(second.indices.tolist(), second.values.softmax(-1).tolist(), strict=True):
                law[a, b] = pa * pb
    spec = {**SPECULATIVE[how], "verification": "rejection"}
    draft = tiny.noisy(strength=0.03) if how in ("chain", "tree") else None
    e = engine(tiny.model(), spec, draft)
    count, seen, accepted = 1500, dict.fromkeys(law, 0), 0
    for start in range(0, count, 50):
        requests = [request(prompt, seed=s, eos=None, **params) for s in range(start, start + 50)]
        for out in run(e, requests):
            seen[tuple(out)] += 1
        accepted += sum(r.stats.accepted for r in requests)
    stat = sum((seen[k] - count * p) ** 2 / (count * p) for k, p in law.items())
    assert len(law) == 9 and stat < 31.83  # chi-square, 8 degrees of freedom, one in ten thousand
    assert how == "ngram" or accepted > 100


def test_rejection_is_greedy_at_temperature_zero() -> None:
    prompts = tiny.prompts(4)
    want = run(engine(tiny.model()), [request(p) for p in prompts])
    spec = {**SPECULATIVE["tree"], "verification": "rejection"}
    assert run(engine(tiny.model(), spec, tiny.noisy()), [request(p) for p in prompts]) == want


@pytest.mark.parametrize("fault", ["width", "row", "nan"])
def test_bad_distributions_of_a_drafter_hurt_nobody(fault: str, capsys) -> None:
    """Rejection with a drafter whose q cannot be used: its requests go on without drafts."""

    class BadQ(Drafter):
        def propose(self, view):
            rows = [0] if fault != "row" else [7]
            logq = torch.full((1, tiny.VOCAB - (fault == "width")), -5.0 if fault != "nan" else float("nan"))
            return Draft.of([Tree([5], [-1], rows) for _ in view.requests], logq)

    register(f"bad-{fault}")(BadQ)
    e = engine(tiny.model(), {"method": f"bad-{fault}", "verification": "rejection"})
    requests = [request(p, seed=i, **SAMPLED) for i, p in enumerate(tiny.prompts(3))]
    run(e, requests)
    assert all(r.finish_reason for r in requests) and "go on without drafts" in capsys.readouterr().err


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([5, tiny.VOCAB], {}, "outside the vocabulary"),
        ([5] * 600, {}, "Shorten it"),
        ([5], dict(logit_bias={9999: 1.0}), "logit_bias"),
        ([5], dict(stop=["x"]), "tokenizer"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(prompt, params, words) -> None:
    e = engine(tiny.model())
    with pytest.raises(BadInput, match=words):
        e.add(request(prompt, **params))
    assert e.idle


def test_length_limits() -> None:
    prompt = tiny.prompts(2)[1]
    r = request(prompt, max_tokens=500, eos=None)
    run(engine(tiny.model(), max_len=len(prompt) + 10), [r])
    assert r.finish_reason == "length" and len(r.tokens) == len(prompt) + 10
    r = request(prompt, max_tokens=1)
    assert len(run(engine(tiny.model(), SPECULATIVE["random"]), [r])[0]) == 1
    assert r.finish_reason == "length" and r.stats.drafted == 0


def test_generate_stops_at_eos_like_transformers() -> None:
    prompt = tiny.prompts(2)[1]
    want = generate(tiny.model(), prompt, 24, eos=None)
    eos = want[6]
    r = request(prompt, eos=eos)
    tiny.Oracle.known = {tuple(prompt): want}
    out = run(engine(tiny.model(), SPECULATIVE["oracle"]), [r])[0]
    assert out == want[: want.index(eos) + 1] and r.finish_reason == "stop"


def step_all(e) -> tuple[dict[str, list[int]], set[str]]:
    """Until nobody is left: the answers, and whose steps broke for good."""
    out: dict[str, list[int]] = {}
    failed: set[str] = set()
    while not e.idle:
        try:
            for r, _ in e.step():
                out[r.id] = r.output
        except StepFailed as caught:
            for r in caught.requests:
                failed.add(r.id)
                e.abort(r)
        e.check_integrity()
    return out, failed


def answers(prompts, how, **config) -> dict[str, list[int]]:
    e = engine(tiny.model(), how, **config)
    rs = [request(p, seed=i, temperature=1.0, max_tokens=12, eos=None) for i, p in enumerate(prompts)]
    return {str(i): out for i, out in enumerate(run(e, rs))}


def taken_on(e, prompts) -> list:
    rs = [request(p, seed=i, temperature=1.0, max_tokens=12, eos=None) for i, p in enumerate(prompts)]
    for i, r in enumerate(rs):
        r.id = str(i)
        e.add(r)
    return rs


def test_a_failed_forward_leaves_nothing_behind(monkeypatch) -> None:
    e = engine(tiny.model())
    taken_on(e, tiny.prompts(4))
    monkeypatch.setattr(e.runner, "forward", lambda batch: 1 / 0)
    out, failed = step_all(e)
    assert not out and failed == {"0", "1", "2", "3"}, "each of them was tried by itself"
    assert not e.pool.tables and not e.delivery.streams
    monkeypatch.undo()
    assert run(e, [request(p) for p in tiny.prompts(4)]) == run(
        engine(tiny.model()), [request(p) for p in tiny.prompts(4)]
    )


@pytest.mark.parametrize("how", [None, {"method": "ngram"}, {"method": "suffix"}])
@pytest.mark.parametrize("when", [1, 4, 9])
def test_a_request_that_breaks_every_step_takes_nobody_along(monkeypatch, how, when: int) -> None:
    prompts = tiny.prompts(6)
    e = engine(tiny.model(), how)
    bad = taken_on(e, prompts)[2]
    emit = e._emit

    def breaks(r, *rest):
        return 1 / 0 if r is bad and r.num_output >= when else emit(r, *rest)

    monkeypatch.setattr(e, "_emit", breaks)
    out, failed = step_all(e)
    assert failed == {"2"} and e.setbacks["step"] == 2, "once with the others, once by itself"
    want = answers(prompts, how)
    assert {i: out[i] for i in out if i != "2"} == {i: want[i] for i in want if i != "2"}


@pytest.mark.parametrize("most", [1, 3])
def test_where_memory_runs_out_fewer_run_at_once_and_nobody_is_lost(monkeypatch, most: int) -> None:
    prompts = tiny.prompts(8)
    e = engine(tiny.model(), {"method": "ngram"})
    taken_on(e, prompts)
    forward, seen = e.runner.forward, []

    def small(batch):
        seen.append(len(batch.segments))
        if len(batch.segments) > most:
            raise torch.OutOfMemoryError("not so many")
        return forward(batch)

    monkeypatch.setattr(e.runner, "forward", small)
    out, failed = step_all(e)
    assert not failed and out == answers(prompts, {"method": "ngram"})
    assert e.setbacks["memory"] == sum(n > most for n in seen) and e.setbacks["step"] == 0
    assert e.setbacks["memory"] < len(seen) / 4, "it does not try again and again"


def test_a_request_that_is_too_much_by_itself_fails(monkeypatch) -> None:
    e = engine(tiny.model())
    taken_on(e, tiny.prompts(3))

    def none(batch):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(e.runner, "forward", none)
    out, failed = step_all(e)
    assert not out and len(failed) == 3


def test_more_may_run_again_when_memory_has_become_free() -> None:
    e = engine(tiny.model())
    taken_on(e, tiny.prompts(8))
    plan = e.scheduler.plan()
    assert e.scheduler.spare(plan) and e.scheduler.most == len(plan.parts) // 2
    for _ in range(GROWS * e.config.max_batch_tokens):
        e.scheduler._recover()
    assert e.scheduler.most == e.config.max_num_seqs


def test_an_engine_that_is_started_again_keeps_who_waits() -> None:
    prompts = tiny.prompts(6)
    e = engine(tiny.model(), {"method": "ngram"}, max_num_seqs=2)
    rs = taken_on(e, prompts)
    for _ in range(3):
        e.step()
    e.pool._free = []  # it has lost its books
    lost = e.restart()
    assert lost == rs[:2] and all(r.finish_reason == "abort" for r in lost)
    out, failed = step_all(e)
    want = answers(prompts, {"method": "ngram"})
    assert not failed and out == {i: want[i] for i in ("2", "3", "4", "5")}
    assert not e.pool.tables and not e.delivery.streams


def test_a_thousand_requests_leave_nothing_behind() -> None:
    """Every table, index and history is empty or bounded after many requests."""
    e = engine(tiny.model(), {"method": "suffix", "suffix_max_requests": 50}, max_batch_tokens=256)
    prompts = tiny.prompts(50)
    for start in range(0, 1000, 50):
        run(e, [request(p, seed=start, temperature=1.0, max_tokens=3, eos=None) for p in prompts])
    drafter = e.drafting.drafters["suffix"]
    assert not drafter._own and not drafter._seen and len(drafter.past.texts()) <= 50
    assert not e.drafting._views and not e.drafting._without and not e.pool.tables and not e.delivery.streams


class Landed:
    """Verdicts that are there from some look on."""

    def __init__(self, at: int) -> None:
        self.looks, self.at = 0, at

    @property
    def has_landed(self) -> bool:
        self.looks += 1
        return self.looks > self.at

    def verdicts(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("at", "followed", "hidden", "in_doubt", "counted"),
    [
        (2, True, 6.0, False, 0.0),  # busy all the while: both what was done before and what is done now are hidden
        (1, True, 5.0, True, 0.0),  # it ended meanwhile, but the device has the next step
        (1, False, 5.0, False, 1.0),  # and here it has none, so it may have waited
        (2, False, 6.0, False, 0.0),
        (0, True, 0.0, False, 0.0),  # it had ended before: whatever was done then may have kept it waiting
    ],
)
def test_what_the_policy_does_counts_only_where_the_device_may_have_waited(
    monkeypatch, at, followed, hidden, in_doubt, counted
) -> None:
    e = engine(tiny.model())
    now = [100.0]
    monkeypatch.setattr("headstart.engine.time.perf_counter", lambda: now[0])
    e.policy.catch_up = lambda coming: now.__setitem__(0, now[0] + 1.0)
    e._learning, e._landed, e.aside = 2.0, 0.0, 0.0
    own, following = Clock(None), Clock(None, policy=3.0)
    flight = SimpleNamespace(clock=own, follows=True, followed=followed)
    e._wait_for(flight, Landed(at), following)
    assert e.aside == hidden and e._in_doubt == (1.0 if in_doubt else 0.0)
    assert (e._learning, following.laps["policy"]) == ((0.0, 0.0) if at else (2.0, 3.0))
    assert own.laps["policy"] == counted and own.laps["host"] == (1.0 if in_doubt and at == 1 else 0.0)
