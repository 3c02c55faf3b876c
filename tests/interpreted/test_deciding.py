"""A policy that decides before drafts are known: whatever it decides, the text is the same; and a rehearsal leaves nothing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from headstart import rehearse, tryouts
from headstart.engine import Engine
from headstart.models import kernel_runner
from headstart.models.heads.grower import Grower
from headstart.models.paged import Device
from headstart.policy.ahead import AheadPolicy
from headstart.policy.periods import Mode
from tests.harness import Drafts, engine, run
from tests.interpreted.test_growth import LONG, asked, eagle, small, wanted

AUTO: dict[str, Any] = {
    "method": "auto", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "num_draft_nodes": 5, "top_k": 2, "max_branches": 2,
    "tree": True,
}  # fmt: skip
MODES = [Mode("ngram", 3, 3), Mode("eagle3", 2, 2), Mode("eagle3", 3, 3), Mode("eagle3", 5, 3)]


@pytest.fixture(autouse=True)
def _small_device(monkeypatch) -> None:
    """Where a head never reads less than the last step may have accepted."""
    monkeypatch.setattr(kernel_runner, "device_limits", lambda device: Device(1, 1 << 16))
    grow, depths = Grower.grow, [0]

    def check(self: Grower, *args: Any) -> Any:
        assert self.growth.rows > depths[-1]
        depths.append(self.growth.depth)
        return grow(self, *args)

    monkeypatch.setattr(Grower, "grow", check)


def decided(**seconds: float) -> tuple[Engine, AheadPolicy]:
    """An engine that knows what steps take: 1 second for a plain one, as much as is said with each drafter."""
    e = engine(small(), AUTO, head=eagle())
    assert isinstance(e.policy, AheadPolicy) and e.texts is not None
    for mode in (None, *MODES):
        e.policy.periods.put(mode, 1, 1.0 if mode is None else seconds.get(mode.drafter, 9.0))
    e.policy._patience = 0  # it decides at once: here the host never waits
    return e, e.policy


@pytest.mark.parametrize(
    ("seconds", "names"), [({"eagle3": 1.01}, {"eagle3"}), ({"ngram": 1.01}, {"ngram"}), ({}, set())]
)
def test_what_pays_is_drafted_and_the_text_is_the_same(seconds: dict[str, float], names: set[str]) -> None:
    e, _ = decided(**seconds)
    drafts, rs = Drafts(e), asked()
    assert run(e, rs, 2) == wanted()
    assert {name for r in rs for name in r.stats.by_drafter} == names
    assert bool(drafts.ahead) == bool(names)


def test_modes_change_and_heads_let_go_while_steps_are_on_their_way(monkeypatch) -> None:
    """Each decision is another one. The second request is served by n-grams now and then, or by nobody, and its head rests
    meanwhile; the last one is never read."""
    e, policy = decided(eagle3=1.01)
    turns, rested, rest = itertools.cycle(range(1, 4)), [], e.drafting.rest
    monkeypatch.setattr(e.drafting, "rest", lambda r: (rested.append(r), rest(r))[1])
    joined, join = [], e.drafting.join
    monkeypatch.setattr(e.drafting, "join", lambda r, names: (joined.append(r), join(r, names)))

    def think(requests: Any) -> Any:
        turn = next(turns)
        policy._steps, policy._due, policy._patience, policy._company = 0, 2, 0, len(requests)
        for r in requests:
            modes = [MODES[1:], [MODES[1], MODES[0], None], [MODES[0], None, None]][r.seed]
            policy._set(policy._guest(r), modes[turn - 1], 9)
        policy._decided = True
        yield

    monkeypatch.setattr(policy, "_think", think)
    monkeypatch.setattr(policy, "enlist", lambda request, load: request.seed != 2)
    drafts, rs = Drafts(e), asked(temperature=0.4)
    assert run(e, rs) == wanted(heat=0.4)
    assert drafts.ahead > 2 and set(rested) == set(joined) == {rs[1]}
    assert [r.space for r in rs] == [1, 1, 0] and [r.unread is None for r in rs] == [True, False, True]
    assert ["eagle3" in r.stats.by_drafter for r in rs] == [True, True, False]


def test_a_decision_that_changes_nothing_lets_the_last_step_be_repeated(monkeypatch) -> None:
    """It is taken while the device is at work: nothing has to be planned and packed anew."""
    e, policy = decided(eagle3=1.01)
    think, thoughts = policy._think, []
    repeat, repeats = e._repeat, []

    def often(requests: Any) -> Any:
        yield from think(requests)
        policy._due, policy._patience = 1, 0  # the next one is due behind every step
        thoughts.append(len(requests))

    monkeypatch.setattr(policy, "_think", often)
    monkeypatch.setattr(e, "_repeat", lambda before, clock: repeats.append(len(thoughts)) or repeat(before, clock))
    assert run(e, asked()) == wanted()
    assert len(repeats) > 3 and len(set(repeats)) > 3, "each behind a decision of its own"


def test_a_rehearsal_measures_every_mode_and_leaves_nothing(monkeypatch) -> None:
    for name, value in dict(COMPANIES=(2,), SOME=1, PROMPT=6, PATTERN=3, WARM=1, TIMED=2, MOST_TOKENS=4).items():
        monkeypatch.setattr(rehearse, name, value)
    monkeypatch.setattr(rehearse, "_mixtures", lambda *args: [])
    e = engine(small(), AUTO | {"num_speculative_tokens": 2, "num_draft_nodes": 3}, head=eagle(), max_num_seqs=2)
    policy = e.policy
    assert isinstance(policy, AheadPolicy)
    assert rehearse.rehearse(e, policy)
    assert e.idle and e.pool.num_used == 0 and not policy.rehearses
    known = [m for m in policy.modes(list(e.drafting.drafters)) if policy.periods.knows(m)]
    assert {m.drafter for m in known} == {"ngram", "suffix", "eagle3"} and policy.periods.known
    assert all(policy.periods.of(m, n) > 0 for m in [None, *known] for n in (1, 2, 7))
    assert policy.kept()["outcomes"] == AheadPolicy(policy.config, policy.choices).kept()["outcomes"], "nor texts"
    monkeypatch.setattr(rehearse, "ALIKE", 1e6)
    assert not rehearse.rehearse(e, policy), "what is known still holds"
    assert run(e, asked(6)) == [text[:6] for text in wanted(LONG)]


def test_drafts_are_tried_out_on_questions_before_anybody_asks(monkeypatch) -> None:
    """What they bring there is what they really bring; and nothing is left of it but that."""
    e, policy = decided(eagle3=1.01)
    monkeypatch.setattr(tryouts, "questions", lambda *args: [list(r.prompt) for r in asked(6)])
    monkeypatch.setattr(tryouts, "ANSWER", 6)
    told: dict[Mode, list[int]] = {}
    expect = policy.outcomes.expect
    monkeypatch.setattr(policy.outcomes, "expect", lambda m, tally: (told.update({m: tally}), expect(m, tally)))
    rs, add = list[Any](), e.add
    monkeypatch.setattr(e, "add", lambda r: (rs.append(r), add(r)))
    assert tryouts.try_out(e, policy, SimpleNamespace(eos_ids=frozenset(), tokenizer=None))
    assert set(told) == {Mode("eagle3", 3, 3), Mode("eagle3", 5, 3)}, "the longest chain, and the largest tree"
    assert e.idle and e.pool.num_used == 0 and not policy.rehearses and not policy.ordered
    assert all(policy.outcomes.knows(m) for m in told)
    for mode, own in zip(told, (rs[: len(rs) // 2], rs[len(rs) // 2 :]), strict=True):
        more = sum(told[mode]) - sum(r.stats.steps - 1 for r in own)
        assert 0 <= more <= len(own), "each step but that of the prompt had a draft; one may come behind the end"
        brought = sum(k * n for k, n in enumerate(told[mode]))
        assert brought >= sum(r.stats.accepted for r in own) > brought - 3 * len(own)
    assert any(r.stats.accepted for r in rs)
    assert not tryouts.try_out(e, policy, SimpleNamespace(eos_ids=frozenset(), tokenizer=None)), (
        "what is known is not tried again"
    )
    assert run(e, asked(6)) == [text[:6] for text in wanted(LONG)]


def test_a_rehearsal_meets_a_head_beside_a_drafter_on_the_host_and_leaves_nothing(monkeypatch) -> None:
    """The host hands over what is computed then, of texts that end too; and the head rests and joins."""
    for name, value in dict(COMPANIES=(3,), SOME=2, PROMPT=6, PATTERN=3, WARM=1, TIMED=1).items():
        monkeypatch.setattr(rehearse, name, value)
    monkeypatch.setattr(rehearse, "_play", lambda *args, **how: dict.fromkeys(args[5], 1.0))
    mixtures, mixed = rehearse._mixtures, list[Any]()
    monkeypatch.setattr(rehearse, "_mixtures", lambda *args: mixtures(*args)[-1:])  # trees alone: that is faster
    e = engine(small(), AUTO | {"num_speculative_tokens": 2, "num_draft_nodes": 3}, head=eagle(), max_num_seqs=3)
    policy, drafter = e.policy, e.drafting.drafters["eagle3"]
    assert isinstance(policy, AheadPolicy)
    flights, handed, written, gaps, rested, joined = [], [], [], [], [], []

    def note(owner: Any, name: str, tell: Any) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (tell(*args), method(*args))[1])

    note(e, "_commit", lambda flight, verdicts: flights.append(flight))
    note(drafter, "read", lambda own, hidden: handed.extend(flights[-1:] if hidden is not None else ()))
    note(drafter, "_write_down", lambda own, *step: written.extend(own))
    note(drafter, "_catch_up", lambda texts, *more: gaps.extend(bool(drafter._trails[t[0]].missed) for t in texts))
    note(e.drafting, "rest", lambda r: rested.append(r.id))
    note(e.drafting, "join", lambda r, names: joined.append(r.id))
    assert rehearse.rehearse(e, policy)
    asked_for = [{(n, w.nodes) for own in flight.drafted.wishes for n, w in own.items()} for flight in handed]
    assert {("eagle3", 3), ("suffix", 2)} in asked_for
    assert rested and set(rested) == set(joined)
    assert any(r.ends for r in written) and set(gaps) == {True, False}, "texts that end, and one that it joined late"
    assert e.idle and e.pool.num_used == 0 and not policy.rehearses and not policy.ordered
    monkeypatch.setattr(rehearse, "_mix", lambda engine, policy, words, *how: mixed.append(how))
    assert not rehearse.rehearse(e, policy), "what is known still holds"
    assert mixed == [(3, Mode("eagle3", 3, 2), Mode("suffix", 2, 2))], "and all is made ready again"
    assert run(e, asked(6)) == [text[:6] for text in wanted(LONG)]


@pytest.mark.parametrize("spec", [{}, {"method": "eagle3", "num_speculative_tokens": 2}], ids=["plain", "a head"])
def test_what_is_prepared_for_other_policies_leaves_nothing(monkeypatch, spec: dict[str, Any]) -> None:
    for name, value in dict(COMPANIES=(2,), PROMPT=6, PATTERN=3, WARM=2, TIMED=1, MOST_TOKENS=4).items():
        monkeypatch.setattr(rehearse, name, value)
    e = engine(small(), spec, head=eagle() if spec else None, max_num_seqs=2)
    sizes = []
    forward = e.runner.forward
    monkeypatch.setattr(e.runner, "forward", lambda batch: sizes.append(len(batch.segments)) or forward(batch))
    rehearse.prepare(e)
    assert 2 in sizes and e.idle and e.pool.num_used == 0
    assert run(e, asked(6)) == [text[:6] for text in wanted(LONG)]


def test_behind_its_own_drafts_a_grower_reads_less_and_drafts_the_same(monkeypatch) -> None:
    calls: list[int] = []
    grow = Grower.grow
    monkeypatch.setattr(Grower, "grow", lambda self, *args: (calls.append(self.growth.rows), grow(self, *args))[1])
    found, rows = [], []
    for less in (True, False):
        e, policy = decided(eagle3=1.01)
        for mode in MODES[2:]:
            policy.periods.put(mode, 1, 9.0)
        for grower in e.drafting.drafters["eagle3"].growers:
            grower.own = grower.own if less else grower
        calls.clear()
        rs = asked(8)
        assert run(e, rs) == [text[:8] for text in wanted(LONG)]
        found.append([(r.stats.drafted, r.stats.accepted, r.stats.steps) for r in rs])
        rows.append(set(calls))
    assert found[0] == found[1] and any(accepted for _, accepted, _ in found[0])
    assert min(rows[0]) < min(rows[1]) == max(rows[1]), "else it read as much as behind any draft"


def test_a_text_that_ends_beside_others_is_written_down_and_nothing_more(monkeypatch) -> None:
    e, _ = decided(eagle3=1.01)
    drafter, caught = e.drafting.drafters["eagle3"], []
    catch_up = drafter._catch_up
    monkeypatch.setattr(
        drafter, "_catch_up", lambda texts, blanks=None: caught.append(texts) or catch_up(texts, blanks)
    )
    monkeypatch.setattr(e, "_can_follow", lambda flight, clock: False)  # every step is settled before the next one
    monkeypatch.setattr(e, "_may_repeat", lambda flight, clock: False)
    written, write_down = [], drafter._write_down
    monkeypatch.setattr(drafter, "_write_down", lambda own, *step: written.extend(own) or write_down(own, *step))
    read, mixed = drafter.read, []
    monkeypatch.setattr(
        drafter, "read", lambda own, hidden: mixed.append({r.ends for r in own} == {True, False}) or read(own, hidden)
    )
    rs, texts = asked(), wanted()
    for r, text, least in zip(rs, texts, (2, 5, 8), strict=True):
        end = next(i for i in range(least, len(text)) if text[i] not in text[:i])
        r.stop_ids = frozenset(text[end : end + 1])
    assert all(text[: len(own)] == own and own for own, text in zip(run(e, rs), texts, strict=True))
    assert {r.id for r in written if r.ends} == {r.id for r in rs} and [r.finish_reason for r in rs] == ["stop"] * 3
    assert any(mixed) and not any(caught)


@pytest.mark.parametrize(
    "shape", [{"num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "num_draft_nodes": 5, "tree": True}]
)
def test_who_watches_sees_a_draft_behind_every_token_and_verifies_none(tmp_path, shape: dict[str, Any]) -> None:
    from headstart.llm import _record
    from headstart.traffic import read_trace

    e = engine(small(), {"method": "eagle3", "policy": "watch", **shape}, head=eagle())
    _record(e, str(tmp_path / "trace.jsonl"))
    rs = asked(6)
    assert run(e, rs) == [text[:6] for text in wanted(LONG)]
    assert all(r.stats.drafted == 0 and r.stats.steps == r.num_output for r in rs)
    e.at_end()
    seen = [r.seen["eagle3"] for r in read_trace(tmp_path / "trace.jsonl").requests]
    assert [[s.position for s in own] for own in seen] == [list(range(1, 5))] * len(rs)
