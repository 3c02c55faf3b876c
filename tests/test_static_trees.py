"""Static trees in the engine: drafts have the shape of the file, tokens are those of their ranks, the text never changes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headstart import LLM, SamplingParams, shapes
from headstart.cli import app
from headstart.cli.tree import measure, measuring
from headstart.config import parse_speculative
from headstart.core import Draft, RequestView, Tree
from headstart.drafters import Drafter
from headstart.errors import ConfigError
from headstart.tally import Tally
from headstart.train.data import Prompt
from headstart.tree import path
from tests import tiny
from tests.harness import engine, request, run
from tests.test_head_drafter import Bigrams, Whole, asked, eagle, plain_texts, watched

PATHS = [[0], [1], [0, 0], [2], [0, 2], [1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]]  # gaps, and a sibling before its elder
SHAPE = tuple(map(tuple, PATHS))
MODEL = {"method": "draft_model", "static_tree": PATHS}
HEAD = {"method": "eagle3", "static_tree": PATHS}


def static(kind: str, more: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine that drafts this shape, with a draft model or a head."""
    own = {"draft": tiny.noisy()} if kind == "model" else {"head": eagle()}
    return engine(tiny.model(), (MODEL if kind == "model" else HEAD) | (more or {}), **own, **options)


def parents_of(paths: Any) -> list[int]:
    return [list(paths).index(p[:-1]) if len(p) > 1 else -1 for p in paths]


@functools.cache
def models() -> tuple[Any, Any, Any]:
    """Target, draft model and head, as transformers and the reference run them."""
    return tiny.model(), tiny.noisy(), eagle()


def ranked_logits(kind: str, tokens: list[int], drafted: list[int]) -> torch.Tensor:
    """(V,) what the drafter thinks behind a text and drafted tokens, from plain forwards over all of it."""
    target, draft, head = models()
    with torch.inference_mode():
        if kind == "model":
            return draft(torch.tensor([[*tokens, *drafted]]), use_cache=False).logits[0, -1]
        context = Whole()
        hidden = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([hidden[t][0] for t in head.spec.taps], -1)
        places = torch.arange(len(tokens) - 1)
        state = head.advance(0, head.begin(features), torch.tensor(tokens[1:]), places, context)[-1:]
        for level, token in enumerate(drafted, start=1):
            position = torch.tensor([len(tokens) - 2 + level])
            state = head.advance(level, state, torch.tensor([token]), position, context)
        return head.logits(len(drafted), state)[0]


# ------------------------------------------------------------------ the drafts
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_draft_has_the_shape_of_the_file_and_tokens_by_rank(kind: str) -> None:
    e = static(kind, share_prefixes=False)
    seen, rs = watched(e), asked(3, eos=None)
    assert run(e, rs) == plain_texts(rs, eos=None) and len(seen) > 12
    order = parents_of(SHAPE)
    whole = [(tokens, draft) for tokens, draft in seen if len(draft) == len(SHAPE)]
    assert len(whole) > 6 and all(draft.parents == order for _, draft in whole)
    for tokens, draft in whole[:: len(whole) // 4]:
        for node, ranks in enumerate(SHAPE):
            above = [draft.tokens[n] for n in path(draft.parents, node)][:-1]
            best = ranked_logits(kind, tokens, above).topk(3).indices.tolist()
            assert draft.tokens[node] == best[ranks[-1]], (ranks, above)
            assert draft.kinds is not None and draft.kinds[node] == ranks[-1]


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize("budget", [1, 4, 8])
def test_a_small_budget_keeps_the_first_nodes(kind: str, budget: int) -> None:
    e = static(kind, {"batch_size_schedule": [[1, 64, budget]]})
    seen, rs = watched(e), asked(2)
    assert run(e, rs) == plain_texts(rs)
    most = parents_of(SHAPE[:budget])
    assert max(len(d) for _, d in seen) == budget
    assert all(d.parents == most for _, d in seen if len(d) == budget)


def test_nothing_is_drafted_behind_the_end_of_the_text() -> None:
    """A node that ends the text keeps its place, and what would follow is not drafted."""
    e = static("model")
    seen = watched(e)
    r = request(tiny.prompts(1)[0], max_tokens=8, eos=None)
    run(e, [r])
    first = next(d for _, d in seen if len(d) == len(SHAPE))
    e = static("model")
    seen = watched(e)
    run(e, [request(tiny.prompts(1)[0], max_tokens=8, eos=first.tokens[0])])
    cut = seen[0][1]
    assert cut.tokens[0] == first.tokens[0]
    assert len(cut) == sum(1 for p in SHAPE if p == (0,) or p[0] != 0)


# ------------------------------------------------------------------ the text
@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "params", [dict(temperature=0.0), dict(temperature=1.0), dict(temperature=0.8, top_p=0.9)], ids=str
)
def test_the_text_is_that_of_plain_decoding(kind: str, count: int, params: dict) -> None:
    rs = asked(count, **params)
    e = static(kind)
    assert run(e, rs) == plain_texts(rs)
    assert all(r.stats.drafted for r in rs if r.stats.steps > 1)
    assert kind == "head" or sum(r.stats.accepted for r in rs) > 0


@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_adaptive_policy_takes_what_pays(kind: str) -> None:
    rs = asked(4, max_tokens=20)
    e = static(kind, {"policy": "adaptive"})
    assert run(e, rs, arrivals=2) == plain_texts(rs)


def test_512_nodes_over_24_levels() -> None:
    shape = shapes.best_shape([[0.85, 0.08, 0.03, 0.01, 0.01, 0.005, 0.003, 0.002]] * 24, 512)
    spec = {"method": "draft_model", "static_tree": shape}
    e = engine(tiny.model(), spec, tiny.noisy(strength=0.005), max_batch_tokens=1100, pages=600)
    seen, rs = watched(e), asked(2, max_tokens=40, eos=None)
    assert run(e, rs) == plain_texts(rs, eos=None)
    assert max(len(d) for _, d in seen) == 512 and max(r.stats.accepted for r in rs) > 10


def test_a_shape_of_one_node_and_of_one_level() -> None:
    rs = asked(2)
    for paths in ([[0]], [[0], [1], [2]]):
        for e in (
            engine(tiny.model(), {"method": "draft_model", "static_tree": paths}, tiny.noisy()),
            engine(tiny.model(), {"method": "eagle3", "static_tree": paths}, head=eagle()),
        ):
            again = asked(2)
            assert run(e, again) == plain_texts(rs)
            assert all(r.stats.drafted for r in again if r.stats.steps > 1)


def test_a_runner_that_holds_few_paths_drafts_chains() -> None:
    e = static("model")
    e.drafting.drafters["draft_model"].runner.most_paths = 0
    seen, rs = watched(e), asked(3)
    assert run(e, rs) == plain_texts(rs)
    assert all(d.parents == Tree.chain(d.tokens).parents for _, d in seen) and max(len(d) for _, d in seen) == 3


def test_a_head_that_cannot_reach_so_deep() -> None:
    with pytest.raises(ConfigError, match="3 levels deep, and this medusa head drafts 2 tokens"):
        engine(tiny.model(), {"method": "medusa", "static_tree": PATHS}, head=Bigrams([]))


def test_drafters_say_what_they_draft() -> None:
    assert "static trees of 9 nodes" in static("head").drafting.drafters["eagle3"].describe()
    assert "static trees of 9 nodes" in static("model").drafting.drafters["draft_model"].describe()


# ------------------------------------------------------------------ rejection
def test_rejection_samples_the_targets_distribution() -> None:
    """First two tokens against the exact law, by chi-square; a shape with gaps, cut between siblings."""
    prompt, stock = tiny.prompts(2)[1], tiny.model()
    law: dict[tuple[int, int], float] = {}
    with torch.inference_mode():
        first = stock(torch.tensor([prompt]), use_cache=False).logits[0, -1].topk(3)
        for a, pa in zip(first.indices.tolist(), first.values.softmax(-1).tolist(), strict=True):
            second = stock(torch.tensor([[*prompt, a]]), use_cache=False).logits[0, -1].topk(3)
            for b, pb in zip(second.indices.tolist(), second.values.softmax(-1).tolist(), strict=True):
                law[a, b] = pa * pb
    paths = [[2], [0], [2, 1], [0, 1], [1], [0, 0], [1, 2], [2, 0], [1, 2, 0]]
    spec = {"method": "draft_model", "static_tree": paths, "batch_size_schedule": [[1, 64, 4]]}
    e = engine(tiny.model(), spec | {"verification": "rejection"}, tiny.noisy(strength=0.05))
    count, seen, accepted = 600, dict.fromkeys(law, 0), 0
    for start in range(0, count, 50):
        rs = [
            request(prompt, seed=s, eos=None, temperature=1.0, top_k=3, max_tokens=3) for s in range(start, start + 50)
        ]
        for out in run(e, rs):
            seen[tuple(out[:2])] += 1
        accepted += sum(r.stats.accepted for r in rs)
    stat = sum((seen[k] - count * p) ** 2 / (count * p) for k, p in law.items())
    assert len(law) == 9 and stat < 31.83  # chi-square, 8 degrees of freedom, one in ten thousand
    assert accepted > 100


@pytest.mark.parametrize("kind", ["model", "head"])
def test_drawn_trees_have_the_shape_whatever_is_drawn(kind: str) -> None:
    e = static(kind, {"verification": "rejection"}, max_batch_tokens=600)
    seen = watched(e)
    run(e, asked(4, temperature=1.5, eos=None))
    assert {tuple(d.parents) for _, d in seen if len(d) == len(SHAPE)} == {tuple(parents_of(SHAPE))}
    known = {tuple(parents_of([p for p in SHAPE if len(p) <= depth])) for depth in range(4)}
    assert {tuple(d.parents) for _, d in seen} <= known
    assert all(d.logq_rows is not None for _, d in seen if len(d))


# ------------------------------------------------------------------ measuring
PLANTED = [[0.5, 0.2, 0.1], [0.7, 0.0, 0.2], [0.3, 0.3, 0.3]]


class Planted(Drafter):
    """Hides the right token at a rank drawn from PLANTED, by depth; everything else is wrong."""

    known: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012

    def propose(self, view: Any) -> Draft:
        return Draft.of([self._tree(r) for r in view.requests])

    def _tree(self, r: RequestView) -> Tree:
        right = self.known[tuple(r.tokens[: r.num_prompt])][len(r.tokens) - r.num_prompt :]
        rng = np.random.default_rng([len(r.tokens), *r.tokens[-3:]])
        ranks = [int(rng.choice(4, p=[*row, 1 - sum(row)])) for row in PLANTED]
        plan = shapes.plan(self.config.static_tree or (), r.budget, min(r.max_depth, len(right)))
        tree, number = Tree(), {(): -1}
        for place, p in enumerate(plan.place):
            is_right = list(p) == ranks[: len(p)]
            tree.tokens.append(right[len(p) - 1] if is_right else (right[len(p) - 1] + 1 + p[-1]) % tiny.VOCAB)
            tree.parents.append(number[p[:-1]])
            number[p] = place
        return tree


def test_planted_chances_are_found_again() -> None:
    prompts = tiny.prompts(8)
    many = dict(max_tokens=250, eos=None)
    Planted.known = dict(
        zip(map(tuple, prompts), run(engine(tiny.model()), [request(p, **many) for p in prompts]), strict=True)
    )
    config, _ = parse_speculative({"method": "tests.test_static_trees.Planted", "num_speculative_tokens": 3})
    e = engine(tiny.model(), measuring(config, nodes=12, ranks=3), max_batch_tokens=600, pages=1200)
    tally = Tally(3, 3)
    e.drafting.listeners.append(tally.hear)
    rs = [request(p, **many) for p in prompts]
    assert run(e, rs) == list(Planted.known.values())
    assert tally.steps > 600
    for depth, row in enumerate(PLANTED):
        for rank, chance in enumerate(row):
            tried = tally.tried[depth][rank]
            assert tried > 100
            off = abs(tally.right[depth][rank] / tried - chance)
            assert off < 4.5 * (chance * (1 - chance) / tried) ** 0.5 + 1e-9, (depth, rank)  # one in 100,000
            assert abs(tally.chances()[depth][rank] - chance) < off + 0.01
    assert shapes.expected_tokens(e.drafting.config.static_tree or (), PLANTED) == pytest.approx(
        sum(r.stats.tokens for r in rs) / sum(r.stats.steps for r in rs), rel=0.05
    )


def test_measuring_through_the_api() -> None:
    """A draft that is the target itself: its best candidate is always right, and the best tree begins with a chain."""
    same = tiny.loaded()
    config, _ = parse_speculative({"method": "draft_model", "model": "x", "num_speculative_tokens": 3})
    prompts = [Prompt(str(i), (("user", text),)) for i, text in enumerate(tiny.CORPUS[:3])]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(same, speculative=measuring(config, 5, 2), draft=tiny.loaded(), kv_memory=1 << 24) as llm:
        found = measure(llm, prompts, params, 5, 2)
    assert found.tally.right[0][0] == found.tally.tried[0][0] > 6 and found.stats.tokens == 36
    assert {(0,), (0, 0), (0, 0, 0)} <= set(found.shape) and len(found.shape) == 5
    assert found.expected["chain_of_same_depth"] <= found.expected["tree"] <= 1 + 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.folder(tmp_path_factory.mktemp("model")))


def headstart(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


FEW = ["--max-tokens", "12", "--kv-memory", "16MB", "--device", "cpu"]


def test_the_command_writes_a_tree_that_generate_uses(folder: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tree.json"
    prompts.write_text("the quick brown fox\na stone bridge\n")
    drafter = ["--model", folder, "--draft-model", folder]
    args = ["--nodes", "6", "-k", "3", "--ranks", "3", "-p", str(prompts), "--out", str(out), *FEW]
    told = json.loads(headstart("tree", *drafter, *args, "--json", "-q").stdout)
    written = json.loads(out.read_text())
    assert written["paths"] == told["paths"] and len(told["paths"]) == 6 and told["drafter"] == "draft_model"
    assert written["steps"] == told["steps"] == told["tried"][0][0]
    assert np.array(told["chances"]).shape == (3, 3)
    text = headstart("tree", *drafter, *args).stdout
    assert "rank 2" in text and "6 nodes over 3 levels" in text and f"--static-tree {out}" in text
    plain = headstart("generate", "the quick", "--model", folder, *FEW, "-q").stdout
    ours = headstart("generate", "the quick", *drafter, "--static-tree", str(out), *FEW, "--json", "-q").stdout
    assert json.loads(ours)["completions"][0]["text"] == plain.removesuffix("\n")
    assert json.loads(ours)["speculative"]["static_tree"] == told["paths"]
    assert json.loads(ours)["completions"][0]["stats"]["drafted"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--drafter", "ngram"], "cannot draft static trees"),
        (["--draft-model", "x", "--tree"], "leave out tree"),
        (["--draft-model", "x", "--policy", "adaptive"], "leave out tree"),
        (["--draft-model", "x", "--nodes", "0"], "--nodes 0 is not usable"),
        (["--draft-model", "x", "--ranks", "100"], "--ranks 100 is not usable"),
        (["--speculative-config", '{"model": "x", "num_speculative_tokens": 0}'], "one level at least"),
        (["--draft-model", "x", "--out", "no/such/place.json"], "not a file in a folder"),
        (["--draft-model", "x", "--prompts", "none.txt"], "none.txt cannot be read"),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(args: list[str], words: str, tmp_path: Path) -> None:
    out = headstart("tree", "--out", str(tmp_path / "t.json"), "--model", "none", *args, code=2)
    assert words in out.stderr and len(out.stderr.strip().splitlines()) == 1


def test_help_and_flags() -> None:
    assert "Example: headstart tree" in headstart("tree", "--help").output
    for verb in ("generate", "chat", "demo"):
        assert "--static-tree" in headstart(verb, "--help").output
    wrong = headstart("generate", "x", "--drafter", "suffix", "--static-tree", "t.json", code=2)
    assert "--static-tree has no effect with --drafter suffix" in wrong.stderr
