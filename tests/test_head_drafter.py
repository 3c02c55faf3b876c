"""Heads in the engine: features reach them without recomputing, drafts are those of a reference, the text never changes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from headstart.core import Batch, Reading, Request, Segment, Tree
from headstart.drafters import Needs
from headstart.drafters.heads import HeadDrafter, Trail
from headstart.errors import ConfigError
from headstart.models.attention import LayerShape
from headstart.models.heads import Head, HeadSpec
from headstart.models.heads.eagle import Eagle3Flags, Eagle3Head
from headstart.policy import Wishes
from headstart.policy.fixed import FixedPolicy
from tests import tiny
from tests.harness import engine, request, run

TAPS = (1, 2, 3)
CHAIN = {"method": "eagle3", "num_speculative_tokens": 4}
TREE = CHAIN | {"tree": True, "num_draft_nodes": 9, "top_k": 3, "max_branches": 3, "p_split": 0.0}


def eagle(draft_vocab: int = tiny.VOCAB, **more: Any) -> Eagle3Head:
    kept = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values.tolist()
    return tiny.eagle(tiny.model().config, TAPS, None if draft_vocab == tiny.VOCAB else kept, **more)


# ------------------------------------------------------------------ a reference that reads whole texts
class Whole:
    """Attention over lists of keys and values: every row sees the rows before it, and nothing is paged."""

    def __init__(self) -> None:
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.values: dict[int, list[torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *_: Any
    ) -> torch.Tensor:
        keys, values = self.keys.setdefault(layer, []), self.values.setdefault(layer, [])
        out = []
        for row in range(len(q)):
            keys.append(k[row])
            values.append(v[row])
            share = q.shape[1] // k.shape[1]
            own_k, own_v = (torch.stack(x).repeat_interleave(share, 1) for x in (keys, values))  # (S, H, D)
            weights = torch.einsum("hd,shd->hs", q[row], own_k).mul(scale).softmax(-1)
            out.append(torch.einsum("hs,shd->hd", weights, own_v))
        return torch.stack(out)


@torch.inference_mode()
def expected_chain(head: Eagle3Head, model: Any, tokens: list[int], depth: int, missed: range = range(0)) -> list[int]:
    """The likeliest chain behind a text, from one plain forward of the target over all of it, but for what the head missed."""
    hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([hidden[t][0] for t in head.spec.taps], -1)
    read = torch.tensor([i for i in range(len(tokens) - 1) if i not in missed])
    context = Whole()
    state = head.advance(0, head.begin(features[read]), torch.tensor(tokens[1:])[read], read, context)[-1:]
    out: list[int] = []
    for level in range(depth):
        best = int(head.logits(level, state).argmax())
        out.append(best if head.targets is None else int(head.targets[best]))
        position = torch.tensor([len(tokens) - 1 + level])
        state = head.advance(level + 1, state, torch.tensor(out[-1:]), position, context)
    return out


def watched(e: Any) -> list[tuple[list[int], Tree]]:
    """Every text that was drafted for, with its draft."""
    drafter, seen = next(iter(e.drafting.drafters.values())), []
    propose = drafter.propose

    def watch(view: Any) -> Any:
        draft = propose(view)
        seen.extend((list(r.tokens), t) for r, t in zip(view.requests, draft.trees(), strict=True))
        return draft

    drafter.propose = watch
    return seen


def plain_texts(rs: list[Any], eos: int | None = 0) -> list[list[int]]:
    copies = [request(r.prompt, seed=r.seed, eos=eos, **vars_of(r)) for r in rs]
    return [run(engine(tiny.model()), [c])[0] for c in copies]


def vars_of(r: Any) -> dict[str, Any]:
    return dict(max_tokens=r.params.max_tokens, temperature=r.params.temperature, top_p=r.params.top_p)


def asked(count: int = 5, **params: Any) -> list[Any]:
    return [request(p, seed=i, **({"max_tokens": 12} | params)) for i, p in enumerate(tiny.prompts(count))]


# ------------------------------------------------------------------ drafts
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}, {"layers": 2},
     {"draft_vocab": 60}],
    ids=str,
)  # fmt: skip
def test_a_chain_is_that_of_the_whole_text(options: dict) -> None:
    """Whatever was read in pieces, beside others, and step by step."""
    head, model = eagle(**options), tiny.model()
    e = engine(tiny.model(), CHAIN, head=head, max_batch_tokens=20, share_prefixes=False)
    seen = watched(e)
    rs = asked(4)
    assert run(e, rs, arrivals=1) == plain_texts(rs)
    assert len(seen) > 30
    for tokens, draft in seen[::3]:
        assert draft.tokens == expected_chain(head, model, tokens, len(draft)), len(tokens)


@pytest.mark.parametrize(
    "options", [{}, {"norm_before_residual": True, "norm_output": True}, {"fc_norm": True, "draft_vocab": 60}], ids=str
)
def test_a_chain_through_loops_is_the_same(options: dict, monkeypatch) -> None:
    """With products as they are, so that nothing but rounding differs."""
    from headstart.models import quantized
    from headstart.models.heads.looped import LoopedEagle3, shrink
    from headstart.models.lean import Product

    monkeypatch.setattr(quantized, "for_drafts", lambda weight: Product)
    monkeypatch.setattr(quantized, "GROUP", 8)
    plain, model = eagle(**options), tiny.model()
    head = shrink(eagle(**options))
    assert isinstance(head, LoopedEagle3)
    e = engine(tiny.model(), CHAIN, head=head, max_batch_tokens=20, share_prefixes=False)
    seen, rs = watched(e), asked(3)
    assert run(e, rs, arrivals=1) == plain_texts(rs)
    assert len(seen) > 20
    for tokens, draft in seen[::3]:
        assert draft.tokens == expected_chain(plain, model, tokens, len(draft)), len(tokens)


def test_eight_bits_change_a_head_a_little(monkeypatch) -> None:
    from headstart.models import quantized
    from headstart.models.attention import Context
    from headstart.models.heads.looped import LoopedEagle3, shrink

    monkeypatch.setattr(quantized, "for_drafts", lambda weight: quantized.Int8Product)
    monkeypatch.setattr(quantized, "GROUP", 16)
    plain, head = eagle(head_dim=16), shrink(eagle(head_dim=16))
    assert isinstance(head, LoopedEagle3) and head.targets is None and head.shapes == plain.shapes
    e = engine(tiny.model(), CHAIN, head=head)
    drafter = e.drafting.drafters["eagle3"]
    batch = Batch(np.zeros(5, np.int64), np.arange(5), [Segment(0, 5, 0, np.arange(5))], np.empty(0, np.int64))
    features, tokens = torch.randn(5, 3 * plain.spec.hidden_size), torch.arange(5)
    found = []
    for own in (plain, head):
        context = Context(batch, drafter.keys, drafter.values, torch.device("cpu"))
        with torch.inference_mode():
            found.append(own.logits(0, own.advance(0, own.begin(features), tokens, tokens, context)))
    error = float((found[0] - found[1]).norm() / found[0].norm())
    assert 0 < error < 0.1, error


def test_chains_after_preemption_are_the_same(capsys) -> None:
    head = eagle()
    e = engine(tiny.model(), CHAIN, head=head, pages=14, max_len=50, share_prefixes=False)
    seen, rs = watched(e), asked(4)
    assert run(e, rs) == plain_texts(rs)
    assert sum(r.stats.preemptions for r in rs) > 0 and "without drafts" not in capsys.readouterr().err
    for tokens, draft in seen[::3]:
        assert draft.tokens == expected_chain(head, tiny.model(), tokens, len(draft))


def test_a_shared_prefix_is_not_read_again() -> None:
    """What another request left in the slots is used: drafts begin at once, from features of the new tokens alone."""
    head, prompt = eagle(), tiny.prompts(1)[0] * 3
    e = engine(tiny.model(), CHAIN, head=head)
    drafter, rows = e.drafting.drafters["eagle3"], []
    read = drafter.read
    drafter.read = lambda readings, hidden: (rows.extend((r.id, len(r.rows)) for r in readings), read(readings, hidden))
    first, second = (request([*prompt, last], max_tokens=3, eos=None) for last in (5, 6))
    run(e, [first])
    run(e, [second])
    shared = second.stats.cached_prompt_tokens
    assert shared > 8 and dict(reversed(rows))[second.id] == len(second.prompt) - shared
    assert second.stats.drafted > 0


@pytest.mark.parametrize("first", [False, "short", True], ids=str)
def test_what_the_head_has_not_read_is_not_shared_with_it(first: Any) -> None:
    """A request without drafts leaves its pages to its like; one that ends early has been read to its end."""
    head, prompt = eagle(), tiny.prompts(1)[0] * 3
    e = engine(tiny.model(), CHAIN, head=head)
    before = request([*prompt, 5], first if first is False else None, max_tokens=1 if first == "short" else 6, eos=None)
    again = request([*prompt, 5], max_tokens=6, eos=None)
    run(e, [before])
    seen = watched(e)
    run(e, [again])
    assert (again.stats.cached_prompt_tokens > 8) == (first is not False)
    for tokens, draft in seen:
        assert draft.tokens == expected_chain(head, tiny.model(), tokens, len(draft))


def test_trees_hold_the_likeliest_paths() -> None:
    head = eagle()
    e = engine(tiny.model(), TREE, head=head, share_prefixes=False)
    seen, rs = watched(e), asked(3)
    assert run(e, rs) == plain_texts(rs)
    assert max(len(t) for _, t in seen) == 9 and any(t.parents.count(-1) > 1 for _, t in seen)
    for tokens, draft in seen[::4]:
        path, node = [], -1
        while (node := next((i for i, p in enumerate(draft.parents) if p == node), None)) is not None:
            path.append(draft.tokens[node])
        best = expected_chain(head, tiny.model(), tokens, 1)
        assert path[:1] == best


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "params", [dict(temperature=1.0), dict(temperature=0.8, top_p=0.9), dict(temperature=0.0)], ids=str
)
def test_the_text_is_that_of_plain_decoding(spec: dict, params: dict) -> None:
    rs = asked(6, **params)
    e = engine(tiny.model(), spec, head=eagle(draft_vocab=120))
    assert run(e, rs, arrivals=2) == plain_texts(rs)
    assert all(r.stats.drafted for r in rs if r.stats.steps > 1) and not e.drafting.drafters["eagle3"]._trails


def test_rejection_runs_with_a_head() -> None:
    rs = asked(3, temperature=1.0)
    e = engine(tiny.model(), TREE | {"verification": "rejection"}, head=eagle(draft_vocab=120))
    run(e, rs)
    assert sum(r.stats.drafted for r in rs) > 0


def test_a_request_without_budget_costs_nothing_and_catches_up_later() -> None:
    head = eagle()
    e = engine(tiny.model(), CHAIN, head=head, share_prefixes=False)
    ask, turn = e.policy.ask, []

    def sometimes(requests: Any, proposals: Any, load: Any) -> list[Wishes]:
        turn.append(not any(proposals))
        return ask(requests, proposals, load) if sum(turn) % 4 == 0 else [{} for _ in requests]

    e.policy.ask = sometimes
    seen, rs = watched(e), asked(2)
    forwards = []
    advance = head.advance
    head.advance = lambda level, *rest: (forwards.append(level), advance(level, *rest))[1]
    assert run(e, rs) == plain_texts(rs)
    assert 0 < forwards.count(0) <= sum(turn) // 4 + 1
    for tokens, draft in seen:
        assert draft.tokens == expected_chain(head, tiny.model(), tokens, len(draft))


class Resting(FixedPolicy):
    """Asks for no drafts while so many tokens of an answer are there, and lets heads rest meanwhile."""

    breaks = (range(3, 7), range(9, 11))

    def rests(self, r: Request) -> bool:
        return any(r.num_output in span for span in self.breaks)

    def ask(self, requests: Any, proposals: Any, load: Any) -> list[Wishes]:
        wishes = super().ask(requests, proposals, load)
        return [{} if self.rests(r) else own for r, own in zip(requests, wishes, strict=True)]

    def holds(self) -> bool:
        return False


def gaps(e: Any) -> dict[tuple[int, ...], range]:
    """What a head had missed of the texts that it drafted for."""
    drafter, missed = next(iter(e.drafting.drafters.values())), {}
    propose = drafter.propose

    def watch(view: Any) -> Any:
        missed.update({tuple(r.tokens): drafter._trails.get(r.id, Trail()).missed for r in view.requests})
        return propose(view)

    drafter.propose = watch
    return missed


@pytest.mark.parametrize(
    "spec", [CHAIN, TREE | {"top_k": 1, "max_branches": 1, "num_draft_nodes": 4}], ids=["chain", "tree"]
)
@pytest.mark.parametrize("options", [{}, {"layers": 2}], ids=str)
def test_a_head_that_rested_joins_again_and_has_missed_what_came_in_between(spec: dict, options: dict) -> None:
    head = eagle(**options)
    e = engine(tiny.model(), spec, head=head, share_prefixes=False)
    e.policy = Resting(e.drafting.config, e.drafting.choices)
    seen, missed, rs = watched(e), gaps(e), asked(3, max_tokens=20)
    assert run(e, rs) == plain_texts(rs)
    assert sum(bool(m) for m in missed.values()) > 6 and all(r.stats.drafted for r in rs)
    for tokens, draft in seen:
        assert draft.tokens == expected_chain(head, tiny.model(), tokens, len(draft), missed[tuple(tokens)])
        at = missed[tuple(tokens)]
        assert not at or any(at.start >= len(r.prompt) and tokens[: len(r.prompt)] == r.prompt for r in rs)


@pytest.mark.parametrize("rests", [True, False])
def test_what_a_head_has_not_read_is_shared_and_known(rests: bool) -> None:
    """The next turn of a talk takes the last one over, whoever drafted for it; drafts do not look at what was missed."""
    head, prompt = eagle(), tiny.prompts(1)[0] * 3
    e = engine(tiny.model(), CHAIN, head=head)
    if rests:
        e.policy = Resting(e.drafting.config, e.drafting.choices)
    first = request(prompt, max_tokens=20, eos=None)
    run(e, [first])
    seen, missed, again = watched(e), gaps(e), request([*first.tokens, 5, 6], max_tokens=6, eos=None)
    e.policy = FixedPolicy(e.drafting.config, e.drafting.choices)
    assert run(e, [again]) == plain_texts([again], None)
    assert again.stats.cached_prompt_tokens > len(prompt) + 12
    found = {m for m in missed.values() if m}
    assert {m.start for m in found} == ({again.unread} if rests else set())
    assert not rests or all(len(prompt) // 4 * 4 <= m.start < m.stop == again.stats.cached_prompt_tokens for m in found)
    for tokens, draft in seen:
        assert draft.tokens == expected_chain(head, tiny.model(), tokens, len(draft), missed[tuple(tokens)])


def test_a_head_that_rested_reads_all_of_a_text_that_is_computed_anew() -> None:
    head = eagle()
    e = engine(tiny.model(), CHAIN, head=head, pages=14, max_len=50, share_prefixes=False)
    e.policy = Resting(e.drafting.config, e.drafting.choices)
    seen, missed, rs = watched(e), gaps(e), asked(4)
    assert run(e, rs) == plain_texts(rs)
    assert sum(r.stats.preemptions for r in rs) > 0
    for tokens, draft in seen:
        assert draft.tokens == expected_chain(head, tiny.model(), tokens, len(draft), missed[tuple(tokens)])


# ------------------------------------------------------------------ features
class Reader(tiny.Oracle):
    """Notes every feature that it is handed, and drafts trees that are often right."""

    needs = Needs(hidden_layers=(0, 2, 3))
    seen: dict[str, dict[int, torch.Tensor]] = {}  # noqa: RUF012
    texts: dict[str, Any] = {}  # noqa: RUF012

    def read(self, readings: list[Reading], hidden: Any) -> None:
        for r in readings:
            self.texts[r.id] = r.tokens
            assert len(r.slots) == r.start + len(r.rows) < len(r.tokens)
            for i, row in enumerate(r.rows):
                self.seen.setdefault(r.id, {})[r.start + i] = torch.cat([hidden[t][row] for t in (0, 2, 3)]).clone()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("pages", [400, 24])
def test_features_are_those_of_the_text(fuse: bool, pages: int) -> None:
    """Of prompts read in pieces, of accepted nodes of trees, after preemption: one for each token that lies in KV."""
    rs = asked(5)
    tiny.Oracle.known = {tuple(r.prompt): t for r, t in zip(rs, plain_texts(rs), strict=True)}
    Reader.seen.clear()
    spec = {"method": "tests.test_head_drafter.Reader", "num_draft_nodes": 12}
    e = engine(tiny.model(), spec, fuse=fuse, pages=pages, max_len=60, max_batch_tokens=24, share_prefixes=False)
    run(e, rs, arrivals=1)
    assert sum(r.stats.accepted for r in rs) > 8
    model = tiny.model()
    for r in rs:
        with torch.inference_mode():
            hidden = model(torch.tensor([r.tokens]), output_hidden_states=True, use_cache=False).hidden_states
        whole = torch.cat([hidden[t][0] for t in (0, 2, 3)], -1)
        got = Reader.seen[r.id]
        assert sorted(got) == list(range(len(got))) and len(got) >= len(r.tokens) - 6
        for position, feature in got.items():
            assert torch.allclose(feature, whole[position], atol=2e-4), (r.id, position)


# ------------------------------------------------------------------ heads that remember nothing
class Bigrams(Head):
    """Drafts what followed a token in texts that it was shown; the features are not even looked at."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        self.spec = HeadSpec("medusa", tiny.model().config.hidden_size, tiny.VOCAB, tiny.VOCAB, (3,), max_depth=2)
        self.table = torch.nn.Parameter(torch.zeros(tiny.VOCAB, tiny.VOCAB))
        for text in texts:
            for a, b in itertools.pairwise(text):
                self.table.data[a, b] = 9.0

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        assert len(features.shape) == 2
        return features

    def advance(
        self, level: int, state: Any, tokens: torch.Tensor, positions: torch.Tensor, context: Any
    ) -> torch.Tensor:
        assert context is None
        return torch.nn.functional.one_hot(tokens, tiny.VOCAB).float()

    def logits(self, level: int, state: torch.Tensor) -> torch.Tensor:
        return state @ self.table


def test_a_head_without_memory_drafts_as_deep_as_it_can() -> None:
    rs = asked(4)
    texts = [r.prompt + t for r, t in zip(rs, plain_texts(rs), strict=True)]
    e = engine(tiny.model(), {"method": "medusa", "num_speculative_tokens": 5}, head=Bigrams(texts))
    seen = watched(e)
    assert run(e, rs) == plain_texts(rs)
    assert {len(t) for _, t in seen} <= {0, 1, 2} and sum(r.stats.accepted for r in rs) > 5


# ------------------------------------------------------------------ what is refused
def test_a_network_of_products_alone_is_made_small_and_still_has_a_device(monkeypatch) -> None:
    from headstart.models import quantized

    monkeypatch.setattr(quantized, "race", lambda products, x: [2.0, 1.0])

    class Products(Head):
        def __init__(self) -> None:
            super().__init__()
            self.spec = HeadSpec("medusa", 64, tiny.VOCAB, tiny.VOCAB, (3,), max_depth=1)
            self.out = torch.nn.Linear(64, tiny.VOCAB)

    head = Products()
    quantized.shrink(head)
    e = engine(tiny.model(), {"method": "medusa"}, head=head)
    assert e.drafting.drafters["medusa"].device == torch.device("cpu")


def test_a_head_needs_its_checkpoint() -> None:
    with pytest.raises(ConfigError, match="needs its checkpoint"):
        engine(tiny.model(), CHAIN)


def test_a_runner_without_hidden_states_is_refused() -> None:
    e = engine(tiny.model())
    e.runner.hidden_states = False
    with pytest.raises(ConfigError, match="needs hidden states"):
        engine(e.runner, CHAIN, head=eagle())


def test_a_drafter_that_breaks_on_features_leaves_its_requests_to_go_on(capsys) -> None:
    head = eagle()
    head.begin = lambda features: 1 / 0
    rs = asked(2)
    assert run(engine(tiny.model(), CHAIN, head=head), rs) == plain_texts(rs)
    assert "without drafts" in capsys.readouterr().err


def test_the_kv_of_a_head_lies_in_the_targets_slots() -> None:
    e = engine(tiny.model(), TREE, head=eagle(layers=2), pages=20)
    drafter = e.drafting.drafters["eagle3"]
    assert isinstance(drafter, HeadDrafter) and len(drafter.keys) == 2
    assert len(drafter.keys[0]) == 80 + 8 * drafter._most_nodes()
    assert drafter.head.shapes[0] == LayerShape(2, 8, 8, torch.float32)


# ------------------------------------------------------------------ from a folder
@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Any, Any]:
    """A tiny model with its tokenizer, and a head for it."""
    from transformers import LlamaConfig

    from headstart.models.heads.save import save_eagle3

    place = tmp_path_factory.mktemp("tiny")
    tiny.folder(place / "model")
    facts = LlamaConfig.from_pretrained(place / "model")
    config = LlamaConfig(
        hidden_size=facts.hidden_size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=facts.vocab_size,
    )  # fmt: skip
    torch.manual_seed(5)
    spec = HeadSpec("eagle3", facts.hidden_size, facts.vocab_size, facts.vocab_size, (1, 2, 3))
    save_eagle3(Eagle3Head(spec, config, Eagle3Flags()), place / "head", "model", 4)
    return place / "model", place / "head"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_head_is_named_like_a_draft_model(folders, dtype: str, monkeypatch) -> None:
    from headstart import LLM, SamplingParams
    from headstart.models import quantized

    monkeypatch.setattr(quantized, "race", lambda products, x: [2.0, 1.0])  # 8 bits are faster here
    model, head = folders
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(model), speculative=None, dtype="float32") as plain:
        wanted = plain.generate("a b c d", params)[0].token_ids
    spec = {"method": "eagle3", "model": str(head), "draft_dtype": dtype}
    with LLM(str(model), speculative=spec, dtype="float32") as llm:
        out = llm.generate("a b c d", params)[0]
        small = type(llm.engine.drafting.drafters["eagle3"].head.layers[0].mlp.down_proj).__name__
    assert out.token_ids == wanted and out.stats.drafted > 0
    assert small == ("SmallLinear" if dtype == "auto" else "Linear")


def test_a_head_of_another_kind_and_none_at_all(folders) -> None:
    from headstart import LLM

    model, head = folders
    with pytest.raises(ConfigError, match="use method 'eagle3'"):
        LLM(str(model), speculative={"method": "medusa", "model": str(head)})
    with pytest.raises(ConfigError, match="needs its checkpoint"):
        LLM(str(model), speculative={"method": "eagle3"})


def test_auto_finds_a_head_that_is_named_or_lies_ready(folders, tmp_path, monkeypatch) -> None:
    from headstart import LLM, SamplingParams
    from headstart.models.heads.at_hand import find_head, is_head

    model, head = folders
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(model), speculative=None) as plain:
        wanted = plain.generate("a b c d", params)[0].token_ids
    assert is_head(head) and not is_head(model) and not is_head(None) and not is_head("no such folder")
    for given, found in (({}, False), ({"model": str(head)}, True), ({"model": str(model)}, False)):
        with LLM(str(model), speculative={"method": "auto", **given}) as llm:
            assert llm.generate("a b c d", params)[0].token_ids == wanted
            assert ("eagle3" in llm.engine.drafting.drafters) == found
            assert ("draft_model" in llm.engine.drafting.drafters) == (given.get("model") == str(model))
    assert find_head(str(model)) is None
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "mine").symlink_to(head)
    assert find_head(str(model)) == tmp_path / "heads" / "mine"
    with LLM(str(model)) as llm:
        assert llm.generate("a b c d", params)[0].token_ids == wanted
        assert tuple(llm.engine.drafting.drafters) == ("ngram", "suffix", "eagle3")
        assert llm.explain().speedup_estimate is not None
    assert list((tmp_path / "costs").glob("*.json")), "what was measured is kept"


def test_the_built_in_model_has_a_head_of_its_own() -> None:
    from headstart.models.builtin import head_of
    from headstart.models.heads.load import TargetFacts, load_head

    path = head_of("smollm2", "eagle3")
    assert path is not None and head_of("smollm2", "medusa") is None and head_of("other", "eagle3") is None
    assert sum(f.stat().st_size for f in path.iterdir()) < 16e6 and (path / "README.md").exists()
    rows = torch.randn(49152, 576)
    facts = TargetFacts("HuggingFaceTB/SmolLM2-135M-Instruct", 576, 49152, 30, torch.randn(49152, 576), rows)
    head = load_head(path, facts, torch.device("cpu"), torch.float32)
    assert head.spec.taps == (2, 15, 27) and head.targets is not None
    assert torch.equal(head.lm_head.weight, rows[head.targets])


def test_a_head_becomes_a_folder_for_vllm(folders, tmp_path, capsys) -> None:
    from safetensors import safe_open
    from typer.testing import CliRunner

    from headstart.cli import app

    model, head = folders
    out = CliRunner().invoke(app, ["convert", str(head), "--out", str(tmp_path / "out"), "--target", str(model)])
    assert out.exit_code == 0, out.output
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {"embed_tokens.weight", "lm_head.weight", "fc.weight"} <= set(file.keys())
        assert file.get_tensor("fc.weight").dtype == torch.bfloat16
    wrong = CliRunner().invoke(
        app, ["convert", str(head), "--out", str(tmp_path / "x"), "--target", str(model), "--dtype", "int3"]
    )
    assert wrong.exit_code == 2 and "is not known" in wrong.output
