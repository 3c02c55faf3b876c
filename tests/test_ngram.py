"""Prompt lookup against a search of the whole text, and at a cost that does not know how long the text is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import SpeculativeConfig
from headstart.core import RequestView, SamplingParams, View
from headstart.drafters import Surroundings
from headstart.drafters.ngram import NgramDrafter, NgramIndex, copy_from


def search(tokens: Sequence[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """Behind the latest earlier occurrence of the longest ending that has one."""
    for n in range(longest, shortest - 1, -1):
        if n > len(tokens):
            continue
        ending = list(tokens[len(tokens) - n :])
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == ending:
                return end, n
    return None


texts = st.lists(st.integers(0, 2), max_size=60)


@given(texts, st.integers(1, 4), st.integers(0, 3))
def test_the_index_finds_what_a_search_finds(tokens: list[int], shortest: int, more: int):
    index = NgramIndex(shortest, shortest + more)
    index.update(tokens)
    assert index.find(tokens) == search(tokens, shortest, shortest + more)


@given(texts, st.lists(st.integers(0, 7), max_size=12), st.integers(1, 3), st.integers(0, 3))
def test_growing_by_blocks_is_the_same_as_all_at_once(tokens: list[int], blocks: list[int], shortest: int, more: int):
    grown = NgramIndex(shortest, shortest + more)
    at = 0
    for block in blocks:
        at = min(at + block, len(tokens))
        grown.update(tokens[:at])
        assert grown.find(tokens[:at]) == search(tokens[:at], shortest, shortest + more)
    grown.update(tokens)
    whole = NgramIndex(shortest, shortest + more)
    whole.update(tokens)
    assert grown.places == whole.places


def test_the_longest_match_wins_over_a_later_one():
    tokens = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    index = NgramIndex(2, 3)
    index.update(tokens)
    assert index.find(tokens) == (3, 3)  # behind 1 2 3, although 2 3 stood later


def test_the_ending_does_not_find_itself():
    index = NgramIndex(1, 3)
    index.update([5, 6, 7])
    assert index.find([5, 6, 7]) is None


# ------------------------------------------------------------------ cost
class CountingDict(dict):
    """Counts how often it is asked or written."""

    operations = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.operations += 1
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        self.operations += 1
        return super().get(key, default)


class CountingList(Sequence):
    """Counts the tokens that are read."""

    def __init__(self, items: list[int]) -> None:
        self.items, self.read = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: Any) -> Any:
        found = self.items[key]
        self.read += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("length", [50, 500, 50_000])
def test_one_more_token_costs_the_same_at_any_length(length: int):
    tokens = CountingList([(i * i) % 1009 for i in range(length)])
    index = NgramIndex(2, 5)
    index.update(tokens)
    index.places = CountingDict(index.places)
    tokens.items.append(3)
    tokens.read = 0
    index.update(tokens)
    found = index.find(tokens)
    if found is not None:
        copy_from(tokens, found[0], 5)
    assert index.places.operations <= 4 + 4  # one entry and one question per size
    assert tokens.read <= 2 * (2 + 3 + 4 + 5) + 5
    assert len(index.places) <= 4 * (length + 1)


# ------------------------------------------------------------------ copying
def test_a_repetition_goes_round():
    assert copy_from([7, 8, 9, 1, 2], 3, 7) == [1, 2, 1, 2, 1, 2, 1]
    assert copy_from([4, 4], 1, 3) == [4, 4, 4]
    assert copy_from([1, 2, 3, 4, 5], 1, 3) == [2, 3, 4]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_copying_is_what_the_text_would_be_if_it_went_on_so(tokens: list[int], data: st.DataObject):
    place = data.draw(st.integers(0, len(tokens) - 1))
    length = data.draw(st.integers(0, 30))
    text = list(tokens)
    for i in range(length):
        text.append(text[place + i])
    assert copy_from(tokens, place, length) == text[len(tokens) :]


# ------------------------------------------------------------------ the drafter
def drafter(**options: Any) -> NgramDrafter:
    return NgramDrafter(SpeculativeConfig("ngram", **options), Surroundings(100))


def view(tokens: list[int], budget: int = 10, max_depth: int = 10, name: str = "a") -> RequestView:
    return RequestView(name, tokens, 1, budget, max_depth, SamplingParams(), 0)


def chains(d: NgramDrafter, *views: RequestView) -> list[list[int]]:
    trees = d.propose(View(list(views))).trees()
    assert all(t.parents == list(range(-1, len(t) - 1)) for t in trees)
    return [t.tokens for t in trees]


TEXT = [1, 2, 3, 4, 5, 6, 1, 2, 3]


def test_a_draft_is_what_followed():
    assert chains(drafter(), view(TEXT)) == [[4, 5, 6, 1, 2]]


@pytest.mark.parametrize(
    ("limits", "options", "length"),
    [({"budget": 2}, {}, 2), ({"max_depth": 3}, {}, 3), ({}, {"num_speculative_tokens": 8}, 8), ({"budget": 0}, {}, 0)],
)
def test_a_draft_stays_within_its_limits(limits: dict[str, int], options: dict[str, int], length: int):
    assert len(chains(drafter(**options), view(TEXT, **limits))[0]) == length


def test_too_short_a_draft_is_dropped():
    assert chains(drafter(min_draft_tokens=4), view(TEXT, budget=3)) == [[]]
    assert chains(drafter(min_draft_tokens=4), view(TEXT, budget=4)) == [[4, 5, 6, 1]]


def test_nothing_to_find_is_an_empty_draft():
    assert chains(drafter(), view([1, 2, 3]), view([], name="b"), view([7], name="c")) == [[], [], []]


def test_requests_do_not_see_each_other():
    d = drafter()
    assert chains(d, view(TEXT), view([1, 2, 3], name="b")) == [[4, 5, 6, 1, 2], []]


def test_output_counts_as_context_and_a_finished_request_is_forgotten():
    d, tokens = drafter(), [1, 2, 3]
    assert chains(d, view(tokens)) == [[]]
    tokens += [9, 1, 2, 3]
    assert chains(d, view(tokens, budget=2)) == [[9, 1]]
    d.release(view(tokens))
    assert not d._indexes
    d.release(view(tokens))
    assert "ngram" in d.describe()
