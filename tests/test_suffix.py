"""The history against plain lists, trees against plain counting, and the file against what can happen to files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import progress
from headstart.config import SpeculativeConfig
from headstart.core import RequestView, SamplingParams, Tree, View
from headstart.drafters import Surroundings, suffix
from headstart.drafters.suffix import GAP, MAX_CANDIDATES, MAX_HOPS, History, SuffixDrafter, grow
from headstart.errors import ConfigError
from headstart.tree import depths, path


# ------------------------------------------------------------------ the history
def all_matches(ring: list[int], first: int, tail: list[int], longest: int) -> list[tuple[int, int]]:
    """Every place with at least two tokens in common on its left, latest first. `ring` begins at place `first`."""
    out = []
    for place in range(first + len(ring) - 1, first + 1, -1):
        left = ring[: place - first]
        n = 0
        while n < min(longest, len(tail), len(left)) and left[-1 - n] == tail[-1 - n]:
            n += 1
        if n >= 2:
            out.append((n, place))
    return out


texts = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


@given(texts, st.lists(st.integers(0, 3), max_size=10), st.integers(2, 8))
def test_matches_are_those_of_a_search(past: list[list[int]], tail: list[int], longest: int):
    history, ring = History(1 << 20), []
    for text in past:
        history.add_text(text)
        ring += [*text, GAP]
    assert history.matches(tail, longest) == all_matches(ring, 0, tail, longest)[:MAX_CANDIDATES]
    assert history.texts() == [t for t in past if t]
    assert len(history) == len(ring)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_a_growing_text_finds_its_own_past_but_not_its_end(tokens: list[int], blocks: list[int]):
    history, at = History(1 << 30), 0
    for block in [*blocks, len(tokens)]:
        history.extend(tokens[at : at + block])
        at = min(at + block, len(tokens))
        found = history.matches(tokens[:at], 8)
        assert found == all_matches(tokens[:at], 0, tokens[:at], 8)[:MAX_CANDIDATES]
        assert all(place < at for _, place in found)


@settings(max_examples=40)
@given(limit=st.sampled_from([2, 5, 100, 1000, 1024, 1025, 1500, 2048, 3000]), seed=st.integers(0, 10**6))
def test_the_ring_holds_the_latest_tokens(limit: int, seed: int):
    """Across growth and overwriting: same tokens, same texts, same matches as the end of a plain list."""
    rng = random.Random(seed)
    history, ring = History(limit), []
    for _ in range(rng.randint(1, 12)):
        text = [rng.randint(0, 40) for _ in range(rng.choice([3, 50, 400, 1023, 1024]))]
        history.add_text(text)
        ring += [*text, GAP]
        held = ring[-limit:]
        first = len(ring) - len(held)
        assert (history.start, history.end) == (first, len(ring))
        assert [history[p] for p in range(history.start, history.end)] == held
        tail = text[:-1][-6:] if rng.random() < 0.5 else text[: rng.randint(2, len(text))][-6:]
        found, expected = history.matches(tail, 6), all_matches(held, first, tail, 6)
        assert found == expected[: len(found)]  # other pairs of the bucket may use up the hops
        assert len(found) == len(expected) or len(found) == MAX_CANDIDATES or limit > 500


def test_memory_is_bounded_by_the_limit():
    history = History(3000)
    for i in range(60):
        history.add_text([(i * j) % 97 for j in range(500)])
    assert len(history) == 3000
    assert {len(history._tokens), len(history._before), len(history._latest)} == {4096}
    small = History(10)
    small.add_text(list(range(5000)))
    assert len(small) == 10 and len(small._tokens) == 1024


def test_only_the_latest_texts_are_kept():
    history = History(1 << 20, max_texts=3)
    for i in range(8):
        history.add_text([i, i, i + 1])
        assert len(history._starts) <= 3
    assert history.texts() == [[5, 5, 6], [6, 6, 7], [7, 7, 8]]
    assert history.matches([4, 4], 5) == []
    assert len(history.matches([6, 6], 5)) == 1


def test_no_texts_at_all_can_be_asked_for():
    history = History(100, max_texts=0)
    history.add_text([1, 2, 3])
    assert history.texts() == []


def test_texts_do_not_run_into_each_other():
    history = History(1000)
    history.add_text([1, 2])
    history.add_text([3, 4])
    assert history.matches([2, 3], 5) == []
    assert [history[p] for _, p in history.matches([1, 2], 5)] == [GAP]


def test_a_look_up_follows_a_bounded_chain(monkeypatch: pytest.MonkeyPatch):
    history = History(1 << 20)
    history.extend([7] * 5000)
    looked = []
    plain = History._agreement
    monkeypatch.setattr(History, "_agreement", lambda self, *a: looked.append(a) or plain(self, *a))
    found = history.matches([7] * 30, 24)
    assert len(found) == MAX_CANDIDATES and len(looked) <= MAX_HOPS
    assert {n for n, _ in found} == {24}
    looked.clear()
    monkeypatch.setattr(History, "_bucket", lambda self, a, b: 0)  # every pair in one bucket
    crowded = History(1 << 20)
    crowded.extend(range(3000))
    assert crowded.matches([1, 2], 5) == []
    assert len(looked) == MAX_HOPS


def test_what_follows_a_place_is_read_round_the_ring():
    history, text = History(1000), [(i * i) % 97 for i in range(5000)]
    history.extend(text)
    assert history.start == 4000
    for place in range(history.start, history.end):
        assert history.after(place, 60) == text[place : place + 60]
    history.add_text([1, 2])
    assert history.after(5000, 9) == [1, 2] and history.after(4998, 9) == [*text[-2:], 1, 2]


# ------------------------------------------------------------------ growth
def chances(history: History, places: list[int], max_depth: int) -> dict[tuple[int, ...], float]:
    """Share of the places at which each continuation stood, by counting."""
    out: dict[tuple[int, ...], float] = {}
    for place in places:
        text: tuple[int, ...] = ()
        while place < history.end and history[place] != GAP and len(text) < max_depth:
            text = (*text, history[place])
            out[text] = out.get(text, 0.0) + 1 / len(places)
            place += 1
    return out


def written(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[n] for n in path(tree.parents, i)) for i in range(len(tree))]


@given(texts, st.integers(0, 12), st.integers(0, 6), st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]), st.integers(0, 3))
def test_grown_trees_hold_the_likeliest_continuations(
    past: list[list[int]], budget: int, max_depth: int, min_prob: float, token: int
):
    history = History(1 << 20)
    for text in past:
        history.add_text(text)
    places = [p + 1 for p in range(history.end) if history[p] == token]
    grown = grow(history, places, budget, max_depth, min_prob)
    counted = chances(history, places, max_depth)
    usable = sorted((p for p in counted.values() if p >= min_prob - 1e-12), reverse=True)
    nodes = written(grown.tree)
    assert len(nodes) == len(set(nodes)) == min(budget, len(usable))
    assert all(p < i for i, p in enumerate(grown.tree.parents))
    assert sorted((counted[n] for n in nodes), reverse=True) == pytest.approx(usable[:budget])
    assert grown.score == pytest.approx(sum(counted[n] for n in nodes))
    assert max(depths(grown.tree.parents), default=0) <= max_depth


def test_no_place_grows_nothing():
    assert len(grow(History(10), [], 5, 5, 0.1).tree) == 0


# ------------------------------------------------------------------ the drafter
class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(c) % 100 for c in text]


def drafter(vocab_size: int = 100, **options: Any) -> SuffixDrafter:
    options.setdefault("num_speculative_tokens", 16)
    progress.set_quiet(True)
    try:
        return SuffixDrafter(SpeculativeConfig("suffix", **options), Surroundings(vocab_size, Letters()))
    finally:
        progress.set_quiet(False)


def view(tokens: list[int], budget: int = 16, max_depth: int = 16, name: str = "a", num_prompt: int = 0) -> RequestView:
    return RequestView(name, tokens, num_prompt, budget, max_depth, SamplingParams(), 0)


def tree_of(d: SuffixDrafter, r: RequestView) -> Tree:
    return d.propose(View([r])).trees()[0]


def test_a_request_draws_on_its_own_text():
    tree = tree_of(drafter(), view([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))
    assert written(tree) == [(4,), (4, 5), (4, 5, 6)]  # as long as the match


def test_a_longer_draft_for_a_longer_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [len(tree_of(drafter(), view([*text, *text[:n]]))) for n in (1, 2, 4)] == [0, 2, 4]
    assert len(tree_of(drafter(suffix_factor=2.0), view([*text, 1, 2]))) == 4


def test_a_tree_where_the_past_forks():
    tree = tree_of(drafter(suffix_factor=2.0), view([7, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]))
    assert {w[0] for w in written(tree) if len(w) == 1} == {3, 4}


def test_past_outputs_serve_other_requests():
    d = drafter()
    finished = view([50, 51, 1, 2, 3, 4, 5], name="old", num_prompt=2)
    tree_of(d, finished)
    d.release(finished)
    assert d.past.texts() == [[1, 2, 3, 4, 5]]  # the output, not the prompt
    assert written(tree_of(d, view([9, 2, 3], name="new"))) == [(4,), (4, 5)]
    assert not d._own.get("old") and "old" not in d._seen


def test_limits_of_a_draft():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    for budget, depth, length in ((2, 9, 2), (9, 2, 2), (0, 9, 0), (9, 0, 0), (9, 9, 5)):
        assert len(tree_of(drafter(), view(text, budget, depth))) == length
    assert len(tree_of(drafter(num_speculative_tokens=3), view(text))) == 3
    assert len(tree_of(drafter(min_draft_tokens=6), view(text))) == 0
    assert len(tree_of(drafter(min_draft_tokens=5), view(text))) == 5


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 8), st.integers(0, 8))
def test_any_text_gives_a_tree_within_its_limits(tokens: list[int], budget: int, max_depth: int):
    d = drafter()
    tree = Tree()
    for end in range(1, len(tokens) + 1, 3):
        tree = tree_of(d, view(tokens[:end], budget, max_depth))
        assert len(tree) <= budget and max(depths(tree.parents), default=0) <= max_depth
        nodes = written(tree)
        assert len(nodes) == len(set(nodes))
        joined = "".join(map(str, tokens[:end]))
        assert all("".join(map(str, w)) in joined for w in nodes)


def test_short_outputs_and_a_limit_of_none_are_not_kept():
    d = drafter()
    d.release(view([1, 2, 3, 4], num_prompt=2))
    assert d.past.texts() == []
    d = drafter(suffix_max_requests=0)
    d.release(view([1, 2, 3, 4], num_prompt=0))
    assert d.past.texts() == []


# ------------------------------------------------------------------ on disk
def test_saved_and_loaded_again(tmp_path: Path):
    file = tmp_path / "past.npz"
    d = drafter(suffix_cache=str(file))
    assert d.past.texts() == []  # no file yet
    texts = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 8, 9]]
    for text in texts:
        d.release(view(text))
    d.close()
    assert [f.name for f in tmp_path.iterdir()] == ["past.npz"]
    again = drafter(suffix_cache=str(file))
    assert again.past.texts() == texts
    assert written(tree_of(again, view([0, 1, 2]))) == written(tree_of(d, view([0, 1, 2]))) == [(3,), (3, 4)]


def test_an_empty_past_is_saved_and_loaded(tmp_path: Path):
    drafter(suffix_cache=str(tmp_path / "p.npz")).close()
    assert drafter(suffix_cache=str(tmp_path / "p.npz")).past.texts() == []


def test_a_corpus_fills_the_past(tmp_path: Path):
    file = tmp_path / "corpus.txt"
    file.write_text("hello world\n\n  \n\nsecond one")
    d = drafter(suffix_corpus=str(file))
    assert d.past.texts() == [Letters().encode("hello world"), Letters().encode("second one")]
    assert tree_of(d, view(Letters().encode("say hell"))).tokens[0] == ord("o") % 100


def test_a_corpus_with_no_room_for_it(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("hello\n\nworld")
    d = drafter(suffix_corpus=str(tmp_path / "corpus.txt"), suffix_max_requests=0)
    assert d.past.texts() == []


def test_a_saved_past_stands_for_the_corpus_that_began_it(tmp_path: Path):
    """Otherwise each start would add the corpus once more."""
    (tmp_path / "corpus.txt").write_text("hello world")
    options = {"suffix_corpus": str(tmp_path / "corpus.txt"), "suffix_cache": str(tmp_path / "past.npz")}
    for _ in range(3):
        d = drafter(**options)
        assert d.past.texts() == [Letters().encode("hello world")]
        d.close()


def test_a_cache_that_could_not_be_written_is_said_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no folder"):
        drafter(suffix_cache=str(tmp_path / "nowhere" / "past.npz"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_a_corpus_that_cannot_be_read(tmp_path: Path, content: bytes | None):
    file = tmp_path / "corpus.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"corpus\.txt cannot be read as text"):
        drafter(suffix_corpus=str(file))


def test_a_cache_of_another_vocabulary_is_refused(tmp_path: Path):
    file = tmp_path / "past.npz"
    d = drafter(vocab_size=50)
    d.release(view([1, 2, 3]))
    d.save(file)
    with pytest.raises(ConfigError, match="vocabulary of 50, this model has 100"):
        drafter(suffix_cache=str(file))


def damaged(kind: str, file: Path) -> None:
    """A cache file that something happened to."""
    d = drafter()
    rng = random.Random(0)
    for _ in range(20):
        d.release(view([rng.randint(0, 99) for _ in range(50)]))
    d.save(file)
    raw = file.read_bytes()
    if kind == "empty":
        file.write_bytes(b"")
    elif kind == "text":
        file.write_bytes(b"not a cache at all")
    elif kind == "half":
        file.write_bytes(raw[: len(raw) // 2])
    elif kind == "flipped":
        middle = len(raw) // 2
        file.write_bytes(raw[:middle] + bytes(b ^ 0xFF for b in raw[middle : middle + 40]) + raw[middle + 40 :])
    elif kind == "one array":
        with file.open("wb") as sink:
            np.save(sink, np.arange(3))
    elif kind == "other names":
        with file.open("wb") as sink:
            np.savez(sink, a=np.arange(3))
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "wrong lengths":
        with file.open("wb") as sink:
            np.savez(sink, vocab_size=np.int64(100), lengths=np.array([5]), tokens=np.arange(3, dtype=np.int32))


@pytest.mark.parametrize(
    "kind", ["empty", "text", "half", "flipped", "one array", "other names", "folder", "wrong lengths"]
)
def test_a_damaged_cache_is_refused_in_one_sentence(tmp_path: Path, kind: str):
    file = tmp_path / "past.npz"
    damaged(kind, file)
    with pytest.raises(ConfigError) as caught:
        drafter(suffix_cache=str(file))
    message = str(caught.value)
    assert "past.npz" in message and "is not a suffix cache that Headstart wrote" in message
    assert "\n" not in message


def test_the_module_tells_its_limits():
    assert suffix.MAX_CANDIDATES <= suffix.MAX_HOPS
    assert "suffix" in drafter().describe()
