"""Steps launched behind drafts that nobody has read yet: the device finds n-grams, places and tokens by itself."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from headstart.core import Request, Sitter
from headstart.drafters.ngram import NgramIndex, copy_from
from headstart.engine import Engine
from headstart.models import kernel_runner
from headstart.models.kernels import ahead
from headstart.models.paged import Device
from headstart.models.runner import TorchRunner
from headstart.models.texts import Texts
from headstart.noise import words
from tests.harness import engine, request, run
from tests.interpreted import test_kernel_engine
from tests.interpreted.test_kernel_engine import PROMPTS

small = functools.partial(test_kernel_engine.small, seed=4)  # a model that repeats itself

NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
LONG = 24  # tokens: enough for the tiny model to go round in circles


@pytest.fixture(autouse=True)
def _small_device(monkeypatch) -> None:
    monkeypatch.setattr(kernel_runner, "device_limits", lambda device: Device(1, 1 << 16))


def asked(max_tokens: int = LONG, eos: int | None = None, **params: Any) -> list[Request]:
    return [request(p, seed=i, eos=eos, max_tokens=max_tokens, **params) for i, p in enumerate(PROMPTS)]


@functools.cache
def wanted(max_tokens: int = LONG) -> list[list[int]]:
    return run(engine(TorchRunner(small())), asked(max_tokens))


class Flights:
    """Forwards whose places only the device knew; and after each step, device and host have the same text."""

    def __init__(self, e: Engine) -> None:
        self.engine, self.step, self.forward, self.again = e, e.step, e.runner.forward, e.runner.again
        self.count = self.repeats = 0
        e.step, e.runner.forward, e.runner.again = self._step, self._forward, self._again  # type: ignore[method-assign]

    def _forward(self, batch: Any) -> Any:
        self.count += any(s.moves for s in batch.segments)
        return self.forward(batch)

    def _again(self, batch: Any) -> Any:
        self.count += batch.mail is not None
        self.repeats += 1
        return self.again(batch)

    def _step(self) -> Any:
        out, texts = self.step(), self.engine.texts
        for r in self.engine.scheduler.running:
            if texts is not None and (seat := texts.find(r.id)) >= 0 and r.num_output:
                known = texts.tokens[seat, : texts.lengths[seat]].tolist()
                assert known[: len(r.tokens)] == r.tokens[: len(known)] and len(known) >= texts._known[r.id]
        return out


# ------------------------------------------------------------------ what n-grams draft
@pytest.mark.parametrize(("shortest", "longest"), [(1, 3), (2, 4), (3, 3), (1, 1)])
def test_the_device_finds_what_the_index_finds(shortest: int, longest: int, monkeypatch) -> None:
    monkeypatch.setattr(ahead, "BLOCK", 8)
    rng = np.random.default_rng(shortest * 10 + longest)
    lines = [rng.integers(0, 4, n).tolist() for n in (1, 2, 3, 5, 8, 9, 17, 40)] + [[5] * 6, [1, 2, 3, 4]]
    texts = Texts(len(lines), 64, torch.device("cpu"))
    seats = texts.sit(Sitter(str(i), line) for i, line in enumerate(lines))
    got = ahead.lookup(texts, texts.on_device(seats), shortest, longest, 7).tolist()
    for line, (count, *tokens) in zip(lines, got, strict=True):
        index = NgramIndex(shortest, longest)
        index.update(line)
        found = index.find(line)
        assert tokens[:count] == ([] if found is None else copy_from(line, found[0], 7)), line


# ------------------------------------------------------------------ seats
def sit(texts: Texts, *sitter: Any) -> int:
    return texts.sit([Sitter(*sitter)])[0]


def test_texts_sit_down_together(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "BLOCK", 4)
    lines = {"a": [1], "b": [2] * 3, "c": [3] * 9, "d": [4] * 17}
    texts = Texts(4, 20, torch.device("cpu"))
    b = sit(texts, "b", [2, 2])
    together = texts.sit(Sitter(name, line, 0.25 * len(line), len(line)) for name, line in lines.items())
    assert sorted(together) == [0, 1, 2, 3] and together[1] == b == texts.find("b")
    for seat, line in zip(together, lines.values(), strict=True):
        assert texts.tokens[seat, : texts.lengths[seat]].tolist() == line
        assert texts.heats[seat] == 0.25 * len(line) and texts.seeds[:, seat].tolist() == list(words(len(line)))
    assert texts.sit([]) == []


def test_a_seat_holds_what_the_host_knew_and_is_written_once() -> None:
    texts = Texts(2, 20, torch.device("cpu"))
    seat = sit(texts, "a", [1, 2, 3])
    assert texts.tokens[seat, :3].tolist() == [1, 2, 3] and texts.lengths[seat] == 3
    texts.tokens[seat, 0] = 9  # not written again
    assert sit(texts, "a", [1, 2, 3, 4]) == seat and texts.tokens[seat, :4].tolist() == [9, 2, 3, 4]
    texts.tokens[seat, 4], texts.lengths[seat] = 5, 5  # a walk appends
    texts.grew("a", 5)
    assert sit(texts, "a", [1, 2, 3, 4, 5]) == seat and texts.tokens[seat, :5].tolist() == [9, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", [0, 1 << 31, (1 << 63) + 7, -3])
def test_a_seat_knows_how_its_text_is_sampled(seed: int) -> None:
    texts = Texts(3, 20, torch.device("cpu"))
    sit(texts, "a", [1])
    seat = sit(texts, "b", [1, 2], 0.75, seed)
    assert texts.heats[seat] == 0.75
    assert tuple(texts.seeds[:, seat].numpy().view(np.uint32).tolist()) == words(seed)


def test_who_was_away_longest_loses_its_seat() -> None:
    texts = Texts(2, 20, torch.device("cpu"))
    first = sit(texts, "a", [1])
    sit(texts, "b", [2, 2])
    sit(texts, "a", [1])
    third = sit(texts, "c", [3, 3, 3])
    assert texts.find("b") == -1 and texts.find("a") == first and third != first
    assert texts.tokens[third, : texts.lengths[third]].tolist() == [3, 3, 3]
    texts.leave("a")
    texts.leave("nobody")
    texts.grew("nobody", 3)
    assert sit(texts, "d", [4]) == first


# ------------------------------------------------------------------ the same text
@pytest.mark.parametrize("arrivals", [0, 3])
def test_steps_follow_drafts_and_the_text_is_the_same(arrivals: int) -> None:
    e = engine(small(), NGRAM)
    flights, rs = Flights(e), asked()
    assert run(e, rs, arrivals) == wanted()
    assert flights.count > 3 and flights.repeats > 3
    assert sum(r.stats.accepted for r in rs) > 10
    assert all(r.stats.tokens == LONG and r.stats.drafted >= r.stats.accepted for r in rs)


def test_drafts_that_come_and_go_between_steps_that_repeat() -> None:
    """Behind a draft, a step without one stands where only the device knows; and so does the one that repeats it."""
    e = engine(small(), NGRAM)
    flights, rs, steps = Flights(e), asked(), itertools.count(1)
    fixed, learn, on, due = e.policy.ask, e.policy.learn, [True], [False]

    def ask(requests: Any, proposals: Any, load: Any) -> Any:
        due[0] = False
        return fixed(requests, proposals, load) if on[0] else [{} for _ in requests]

    def learned(*args: Any) -> None:
        learn(*args)
        if next(steps) % 3 == 0:
            on[0], due[0] = not on[0], True

    e.policy.ask, e.policy.learn, e.policy.holds = ask, learned, lambda: not due[0]  # type: ignore[method-assign]
    assert run(e, rs) == wanted()
    assert flights.repeats > 4 and all(r.stats.drafts > 1 for r in rs)


def test_a_drafter_that_breaks_when_it_is_asked_again_leaves_the_text_as_it_is() -> None:
    e = engine(small(), NGRAM)
    flights, rs = Flights(e), asked()[1:2]
    drafter, count = e.drafting.drafters["ngram"], itertools.count()
    lookup = drafter.again

    def breaks(view: Any) -> Any:
        return lookup(view) if next(count) < 2 else 1 / 0

    drafter.again = breaks  # type: ignore[method-assign]
    assert run(e, rs) == wanted()[1:2]
    assert next(count) > 2 and flights.repeats > 2


def test_drafts_are_those_of_the_host() -> None:
    """Alone, so that both see the same texts at the same steps; the end is left out, where a step ahead may be cut short."""
    told = []
    for e in (engine(TorchRunner(small()), NGRAM), engine(small(), NGRAM)):
        r = asked(LONG)[1]
        run(e, [r])
        told.append((r.stats.drafted, r.stats.accepted, r.stats.steps))
    assert abs(told[0][0] - told[1][0]) <= 3 and told[0][1:] == told[1][1:]


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 7, 11])
def test_a_text_ends_where_it_must(max_tokens: int) -> None:
    e = engine(small(), NGRAM)
    rs = asked(max_tokens)
    assert run(e, rs) == [w[:max_tokens] for w in wanted()]
    assert all(r.finish_reason == "length" for r in rs)


def test_a_text_ends_at_its_stop_token_while_the_next_step_is_on_its_way() -> None:
    stop = wanted()[0][7]
    ends = [w.index(stop) + 1 if stop in w else LONG for w in wanted()]
    assert ends[0] <= 8
    e = engine(small(), NGRAM)
    flights = Flights(e)
    assert run(e, asked(eos=stop)) == [w[:n] for w, n in zip(wanted(), ends, strict=True)]
    assert flights.count and not e.texts._seats


@pytest.mark.parametrize("max_len", [12, 13, 16, 21])
def test_the_longest_text_that_the_engine_holds(max_len: int) -> None:
    e = engine(small(), NGRAM, max_len=max_len)
    got = run(e, asked()[:2])
    for p, g, w in zip(PROMPTS, got, wanted(), strict=False):
        assert g == w[: max_len - len(p)] and len(g) == min(LONG, max_len - len(p))


@pytest.mark.parametrize("pages", [10, 16])
def test_little_memory(pages: int) -> None:
    """Requests are set aside and come back; drafts shrink."""
    e = engine(small(), NGRAM, pages=pages, max_len=36, share_prefixes=pages != 12)
    rs = asked()
    assert run(e, rs, arrivals=1) == wanted()


def test_sampled_and_biased_requests_beside_greedy_ones() -> None:
    """The host drafts for the ones, the device for the others, in one step."""
    more = [dict(temperature=1.0), dict(logit_bias={5: 1.0}), dict(temperature=0.0)]

    def both() -> list[Request]:
        return [
            request(p, seed=i, eos=None, max_tokens=12, **m) for i, (p, m) in enumerate(zip(PROMPTS, more, strict=True))
        ]

    reference = run(engine(TorchRunner(small())), both())
    e = engine(small(), NGRAM)
    assert run(e, both(), arrivals=2) == reference


def test_a_request_may_go_without_drafts_beside_others() -> None:
    e = engine(small(), NGRAM)
    rs = asked()
    rs[1] = request(PROMPTS[1], {"enabled": False}, seed=1, eos=None, max_tokens=LONG)
    assert run(e, rs) == wanted()
    assert rs[1].stats.drafted == 0 and rs[0].stats.drafted > 0


def test_a_request_is_cancelled_behind_a_draft() -> None:
    e = engine(small(), NGRAM)
    flights, rs = Flights(e), asked()
    for r in rs:
        e.add(r)
    while flights.count < 2:
        e.step()
    e.abort(rs[0])
    run(e, [])
    assert [r.output for r in rs[1:]] == wanted()[1:] and not e.texts._seats


def test_library_products_follow_too(monkeypatch) -> None:
    """Without graphs and without the fused kernels."""
    e = engine(small(), NGRAM, fuse=False)
    flights = Flights(e)
    assert run(e, asked(12)) == [w[:12] for w in wanted()]
    assert flights.count


def test_a_policy_that_has_measured_nothing_drafts_nothing() -> None:
    e, rs = engine(small(), NGRAM | {"policy": "adaptive"}), asked(12)
    assert run(e, rs) == [w[:12] for w in wanted()] and not any(r.stats.drafted for r in rs)


def test_drafts_of_different_lengths_stay_in_their_own_rows() -> None:
    """One request may have one token drafted, its neighbour six, and their texts are alike."""
    prompts = [PROMPTS[1], PROMPTS[1] + wanted()[1][:3], PROMPTS[1] + wanted()[1][:6]]
    spec = NGRAM | {"num_speculative_tokens": 6}

    def rs(how: Any) -> list[Request]:
        most = [{"max_tokens": 1}, {"max_tokens": 2}, None]
        return [
            request(p, how or m, seed=i, eos=None, max_tokens=10 + i)
            for i, (p, m) in enumerate(zip(prompts, most, strict=True))
        ]

    assert run(engine(small(), spec), rs(None)) == run(engine(TorchRunner(small())), rs(None))


def test_more_mail_than_rows() -> None:
    """Room for the size of each draft, and for drafts of which one is longer than the others."""
    prompts = [PROMPTS[i % 3] + [i] for i in range(7)]
    spec = NGRAM | {"num_speculative_tokens": 9}
    ours = [request(p, seed=i, eos=None, max_tokens=12) for i, p in enumerate(prompts)]
    theirs = [request(p, seed=i, eos=None, max_tokens=12) for i, p in enumerate(prompts)]
    assert run(engine(small(), spec, max_batch_tokens=64), ours) == run(engine(TorchRunner(small())), theirs)


def test_room_that_was_promised_is_held_before_anybody_else_gets_some() -> None:
    e = engine(small(), NGRAM, pages=9, max_len=34, share_prefixes=False)
    rs = asked(12)
    assert run(e, rs, arrivals=2) == [w[:12] for w in wanted()]
