"""Heads that draft on the device: the same trees as on the host, the same text, whoever comes and goes."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import pytest
import torch

from headstart.core import Request
from headstart.drafters import heads
from headstart.models import kernel_runner
from headstart.models.heads import grower
from headstart.models.heads.eagle import Eagle3Head
from headstart.models.paged import Device
from headstart.models.runner import TorchRunner
from headstart.policy.fixed import FixedPolicy
from tests import tiny
from tests.harness import Drafts, engine, request, run
from tests.interpreted import test_kernel_engine
from tests.interpreted.test_kernel_engine import PROMPTS
from tests.test_head_drafter import Bigrams, Resting

small = functools.partial(test_kernel_engine.small, "llama", seed=4)
CHAIN: dict[str, Any] = {"method": "eagle3", "num_speculative_tokens": 3}
TREE = CHAIN | {"tree": True, "num_draft_nodes": 7, "top_k": 3, "max_branches": 2, "p_split": 0.0}
LONG = 12


@pytest.fixture(autouse=True)
def _small_device(monkeypatch) -> None:
    monkeypatch.setattr(kernel_runner, "device_limits", lambda device: Device(1, 1 << 16))


def asked(max_tokens: int = LONG, **params: Any) -> list[Request]:
    return [request(p, seed=i, eos=None, max_tokens=max_tokens, **params) for i, p in enumerate(PROMPTS)]


@functools.cache
def wanted(max_tokens: int = LONG, heat: float = 0.0) -> list[list[int]]:
    return run(engine(TorchRunner(small())), asked(max_tokens, temperature=heat))


def eagle(few: bool = True, heat: float = 0.0) -> Eagle3Head:
    """With `few`, it drafts only tokens that the target likes, and so is often right."""
    used = [t for t, _ in collections.Counter(t for text in wanted(heat=heat) for t in text).most_common(4)]
    return tiny.eagle(small().config, (0, 1, 2), sorted(used) if few else None, head_dim=32)


SPECS = {"chain": CHAIN, "tree": TREE, "wide": TREE | {"top_k": 4, "max_branches": 12, "num_draft_nodes": 20}}


@functools.cache
def by_the_host(name: str, few: bool, heat: float) -> dict[tuple[int, ...], Any]:
    """The drafts of the host's own code, one request at a time; they go on behind the end of the device's."""
    e = engine(TorchRunner(small()), SPECS[name], head=eagle(few, heat))
    drafts = Drafts(e)
    for r in asked(LONG + 8, temperature=heat):
        run(e, [r])
    assert not drafts.ahead
    return drafts.found


@pytest.mark.parametrize(
    ("name", "arrivals", "few", "fused", "heat"),
    [("chain", 2, True, True, 0.0), ("tree", 3, True, False, 0.4), ("wide", 0, False, True, 0.0)],
)
def test_drafts_are_those_of_the_host(
    name: str, arrivals: int, few: bool, fused: bool, heat: float, monkeypatch
) -> None:
    if not fused:
        monkeypatch.setattr(grower, "fusible", lambda head: False)
    e = engine(small(), SPECS[name], head=eagle(few, heat))
    drafts, rs = Drafts(e), asked(temperature=heat)[: 1 if name == "wide" else 3]
    assert run(e, rs, arrivals) == wanted(heat=heat)[: len(rs)]
    host = by_the_host(name, few, heat)
    drafted = {text: draft for text, draft in drafts.found.items() if draft[0] and text in host}
    assert len(drafted) > 4 * len(rs) and drafts.ahead > 3
    assert drafted == {text: host[text] for text in drafted}
    assert not few or sum(r.stats.accepted for r in rs) > 1


def test_everybody_in_one_batch_has_its_own_text_and_drafts() -> None:
    """Small budgets, no speculation, noise, unlikely tokens left out, and penalties that the host decides, all at once."""
    own: list[tuple[Any, dict[str, Any]]] = [
        (None, {}), ({"max_tokens": 2}, {}), (False, {}), (None, dict(temperature=1.0)), (None, dict(repetition_penalty=1.2)),
        (None, dict(temperature=0.8, top_p=0.9)),
    ]  # fmt: skip

    def requests() -> list[Request]:
        prompts = [*PROMPTS, *PROMPTS]
        return [request(prompts[i], s, seed=i, eos=None, max_tokens=8, **p) for i, (s, p) in enumerate(own)]

    rs = requests()
    assert run(engine(small(), TREE, head=eagle()), rs) == run(engine(TorchRunner(small())), requests())
    assert [bool(r.stats.drafted) for r in rs] == [True, True, False, True, True, True]
    assert rs[1].stats.drafted <= 2 * rs[1].stats.drafts


def test_prompts_are_read_while_they_are_on_their_way(monkeypatch) -> None:
    """In pieces, with others that draft beside them: no step waits for the last, and drafts are those of the host."""
    e = engine(small(), CHAIN, head=eagle(), max_batch_tokens=12)
    read, followed, settle = [], [], e._settle

    def settled(flight: Any, following: Any = None) -> None:
        if flight.plan.num_prefill_tokens:
            read.append(flight.read)
            followed.append(flight.followed)
        settle(flight, following)

    monkeypatch.setattr(e, "_settle", settled)
    drafts, rs = Drafts(e), asked()
    assert run(e, rs, 2) == wanted()
    assert all(read) and sum(followed) > len(followed) / 2 and len(read) > len(rs)
    host = by_the_host("chain", True, 0.0)
    drafted = {text: draft[0] for text, draft in drafts.found.items() if draft[0] and text in host}
    assert len(drafted) > 4 * len(rs)  # some are cut where a step has no room
    assert drafted == {text: host[text][0][: len(own)] for text, own in drafted.items()}


def test_a_forward_makes_the_entries_that_are_made_apart_from_it() -> None:
    """Of prompts in pieces, one of which is a single token, beside a request that drafts. What is not read is not touched."""
    e = engine(small(), CHAIN, head=eagle(), max_batch_tokens=4)
    drafter, forward, batches = e.drafting.drafters["eagle3"], e.runner.forward, []
    with torch.inference_mode():
        drafter.keys[0].fill_(7.0)

    def run_and_write_down(batch: Any) -> Any:
        out = forward(batch)
        if batch.behind is not None:
            rows = np.flatnonzero(batch.behind >= 0)
            batches.append(len(rows))
            slots = batch.write_slots[rows]
            made, others = drafter.keys[0][slots].clone(), np.setdiff1d(np.arange(drafter.num_slots), slots)
            kept = drafter.keys[0].clone()
            drafter.growers[0].remember(
                e.runner.left.hidden, np.stack([rows, batch.behind[rows], batch.positions[rows], slots])
            )
            torch.testing.assert_close(made, drafter.keys[0][slots], atol=1e-4, rtol=0)
            assert not bool((made == 7.0).any())
            assert torch.equal(kept[others], drafter.keys[0][others])
        return out

    e.runner.forward = run_and_write_down  # type: ignore[method-assign]
    rs = [*asked(), request(list(range(2, 13)))]
    run(e, rs)
    assert 1 in batches and sum(batches) == sum(len(r.prompt) - 1 for r in rs)


def test_a_head_that_remembers_nothing_needs_no_reader() -> None:
    e = engine(small(), {"method": "medusa", "num_speculative_tokens": 2}, head=Bigrams([]))
    assert e.drafting.drafters["medusa"].reads_ahead and e.runner.reader is None


def test_a_prompt_that_is_shared_to_its_last_token_is_read_on_from_there() -> None:
    """One row of it is computed, beside a prompt that is read: drafts are those of the host all the same."""
    e = engine(small(), CHAIN, head=eagle())
    first, again, other = asked()[1], asked()[1], asked()[2]
    run(e, [first])
    drafts = Drafts(e)
    assert run(e, [again, other]) == [wanted()[1], wanted()[2]]
    assert again.stats.cached_prompt_tokens == len(again.prompt) - 1
    host = by_the_host("chain", True, 0.0)
    drafted = {text: draft for text, draft in drafts.found.items() if draft[0] and text in host}
    assert len(drafted) > 8 and drafted == {text: host[text] for text in drafted}
    assert (
        min(len(text) for text in drafted if text[: len(again.prompt)] == tuple(again.prompt)) == len(again.prompt) + 1
    )


def test_drafts_behind_a_gap_are_those_of_the_host(monkeypatch) -> None:
    """A head rests while others draft beside it, and joins again: the device does not look at what it has missed."""
    e = engine(small(), CHAIN, head=eagle())
    e.policy = Resting(e.drafting.config, e.drafting.choices)
    drafts, device, host = Drafts(e), e.drafting.drafters["eagle3"], engine(TorchRunner(small()), CHAIN, head=eagle())
    missed: dict[tuple[int, ...], range] = {}
    join = device.join

    def joined(request: str, position: int) -> None:
        join(request, position)
        r = next(r for r in rs if r.id == request)
        missed[tuple(r.prompt)] = device._trails[request].missed

    monkeypatch.setattr(device, "join", joined)
    rs = asked(20)
    assert run(e, rs, 2) == wanted(20)
    assert len(missed) == len(rs) and all(r.stats.accepted for r in rs) and drafts.ahead > 6

    reader = host.drafting.drafters["eagle3"]
    read, found = reader.read, Drafts(host)

    def forgetful(readings: Any, hidden: Any) -> None:
        read(readings, hidden)
        for r in readings:
            own = next(m for prompt, m in missed.items() if tuple(r.tokens[: len(prompt)]) == prompt)
            trail = reader._trails[r.id]
            if trail.known > own.stop:
                assert trail.read >= own.stop, "features that wait are of what it has read"
                trail.missed = own

    monkeypatch.setattr(heads, "EAGER", 1)
    monkeypatch.setattr(reader, "read", forgetful)
    for r in asked(28):
        run(host, [r])
    behind = {
        text: draft
        for text, draft in drafts.found.items()
        if draft[0]
        and text in found.found
        and any(len(text) > m.stop + 2 and text[: len(p)] == p for p, m in missed.items())
    }
    assert len(behind) > 3 * len(rs)
    assert behind == {text: found.found[text] for text in behind}


class Sudden(FixedPolicy):
    """Nobody knows that it will wish for drafts before it is asked for the first time."""

    def is_quiet(self, request: Request) -> bool:
        return not request.num_output

    rests = is_quiet


def test_drafts_begin_without_a_wait_where_a_head_has_read_the_prompt() -> None:
    e = engine(small(), CHAIN, head=eagle())
    e.policy = Sudden(e.drafting.config, e.drafting.choices)
    follows, can_follow = [], e._can_follow
    e._can_follow = lambda flight, clock: follows.append(can_follow(flight, clock)) or follows[-1]  # type: ignore[method-assign]
    rs = asked()[:2]
    assert run(e, rs, arrivals=3) == wanted()[:2]
    assert follows and all(follows) and sum(r.stats.drafts for r in rs) > 8
