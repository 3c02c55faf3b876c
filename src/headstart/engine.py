"""The step: plan, budget, draft, one target forward over all trees, verify, commit.

The engine knows requests, trees and verdicts. It does not know which drafter it has, how a runner computes, or who
reads the text.

A step is *launched*, and *settled* once its verdicts are known. A runner that chooses tokens itself lets the host go in
between. Where the next step needs nothing from this one but the chosen tokens, which the device has, it is launched first
and this one settled while the device works: until then a placeholder stands for each token. Behind drafts the host does not
know how many tokens come either: it plans as if none were accepted, and the device moves the step on (`Texts`). Text is
made last, also while the device works.

Mostly a step is the one before it over again: the same requests, one token or one draft further. Where the device finds its way
by itself, nothing is planned and packed anew then (`_repeat`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headstart import sampling, tree, verify
from headstart.config import EngineConfig, SpeculativeConfig
from headstart.core import (
    NOTHING,
    PENDING,
    Batch,
    Choice,
    Chunk,
    Forward,
    Landing,
    Reading,
    Request,
    Segment,
    Sitter,
    Tree,
    Verdict,
)
from headstart.delivery import Decode, Delivery, Parcel
from headstart.drafters import Surroundings
from headstart.drafting import NO_TREE, Drafted, Drafting, Left
from headstart.errors import BadInput
from headstart.kv import KVPool
from headstart.models.base import Runner
from headstart.noise import Chance, derive_seed
from headstart.policy import Load, Policy, StepTimes, Wish, Wishes
from headstart.policy.choose import make_policy
from headstart.scheduler import Plan, Planned, Scheduler

log = logging.getLogger("headstart.engine")
NO_VERDICT = Verdict([], 0)
REPEATS = 16  # steps for which KV is reserved at once, so that they may repeat the one before them
LAPS = ("draft", "target", "verify", "host", "policy")
COMPARED, PLAIN = len(LAPS), len(LAPS) + 1  # places behind them
Watch = Callable[[StepTimes, Sequence[Tree], Sequence[Verdict]], None]
RUN_ON = 4  # tokens that a runner may choose in one step for a request that is alone,
RUN_ON_SECONDS = 0.04  # and how long that may take


class Clock:
    """Laps of one step. With `wait`, the device is waited for, so that a lap shows its own work."""

    def __init__(self, wait: Callable[[], None] | None, policy: float = 0.0) -> None:
        """`policy`: seconds that were spent on deciding before."""
        self._wait, self.began = wait, time.perf_counter()
        self._last = self.began
        self.laps = {"host": 0.0, "policy": policy, "draft": 0.0, "target": 0.0, "verify": 0.0}

    def lap(self, name: str, since: float = 0.0) -> float:
        """Book the time since the last lap, or since a later moment that is given, under this name. Returns now."""
        if self._wait:
            self._wait()
        now = time.perf_counter()
        self.laps[name] += now - max(self._last, since)
        self._last = now
        return now

    def move(self, seconds: float, source: str, to: str) -> None:
        """They were booked under the wrong name."""
        self.laps[source] -= seconds
        self.laps[to] += seconds


@dataclass(eq=False)
class Flight:
    """A step that was launched and is not settled yet."""

    plan: Plan
    drafted: Drafted
    batch: Batch
    roots: list[int]  # for each part: where its last known token stands among the logits; its draft is behind it
    forward: Forward
    clock: Clock
    chosen: list[bool]  # for each ready part: the runner chooses, or has chosen
    follows: bool = False  # it was launched before the last one was settled
    expected: list[Request] = field(default_factory=list)  # went on, on placeholders for this step's tokens
    settled: bool = False
    read: bool = False  # drafters have read what it has of prompts: they need not wait for its end
    followed: bool = False  # the next step was launched before this one was settled
    again: int = 0  # so many steps may repeat it,
    stamp: tuple[int, int] = (0, 0)  # as long as nobody came or went since then

    @functools.cached_property
    def drafted_for(self) -> dict[str, int]:
        """How many tokens requests may accept, those that may."""
        if not any(self.drafted.depth):
            return {}
        return {p.request.id: depth for p, depth in zip(self.plan.ready, self.drafted.depth, strict=True) if depth}

    @property
    def lines(self) -> dict[str, int]:
        """Which segment is whose, of those that the runner chooses for."""
        chosen = iter(self.chosen)
        return {p.request.id: i for i, p in enumerate(self.plan.parts) if p.ready and next(chosen)}


class StepFailed(Exception):
    """A step broke; these requests were in it. The cause is chained."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(f"a step with {len(requests)} requests failed")
        self.requests = requests


class Engine:
    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        max_len: int,
        num_pages: int,
        speculative: SpeculativeConfig | None = None,
        around: Surroundings | None = None,
        decode: Decode | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.runner, self.config, self._longest = runner, config, max_len
        self._open(num_pages)
        runner.allocate(self.pool.num_slots, config.page_size, config.max_batch_tokens, config.max_num_seqs)
        self.drafting = Drafting(speculative or SpeculativeConfig(), around or Surroundings(runner.vocab_size))
        self.policy: Policy = policy or make_policy(self.drafting.config, self.drafting.choices, runner.chooses)
        self.delivery = Delivery(decode)
        for drafter in self.drafting.drafters.values():
            drafter.allocate(self.pool.num_slots)
        runner.reader = self.drafting.reader if runner.chooses else None
        ahead = any(d.ahead for d in self.drafting.drafters.values()) and not self.policy.cuts
        self.texts = runner.open_texts(self.max_len) if ahead else None
        self._plan = Plan()  # of the step that is being launched
        self._flight: Flight | None = None
        self._lines: dict[str, int] = {}  # of the last forward
        self._parcels: list[Parcel] = []  # settled, not delivered yet
        self._landed = 0.0  # when the last forward was seen to be over
        self._settled = 0.0  # when the last step was
        self._seconds = [0.0] * (PLAIN + 1)  # of all steps so far: laps, those that were compared, plain ones instead
        # seconds that the policy took to learn from the last step, and for newcomers, which count as deciding
        self._learning = self._welcoming = 0.0
        self._in_doubt = 0.0  # and beside this one, for longer than it took: the next one shows if the device waited
        self.aside = 0.0  # all that it took while the device was at work anyway, which is not counted
        self._pace = 0.0  # seconds of the last forward of one row, with all that surrounds it
        self._wait = runner.synchronize if config.profile else None
        self.setbacks = {"step": 0, "memory": 0}  # steps that broke, and those for which memory was short
        self.at_end: Callable[[], None] = lambda: None  # whoever wants to keep something
        self.watch: Watch | None = None  # whoever counts steps: their times, drafts and verdicts

    # ------------------------------------------------------------------ coming and going
    def add(self, request: Request) -> None:
        """Take a request on; says what is wrong with it before anything is allocated."""
        self.check(request)
        self.drafting.add(request)
        request.arrived = request.arrived or time.perf_counter()
        self.delivery.add(request)
        self.scheduler.add(request)

    def _welcome(self, request: Request) -> None:
        """It is next in line, and now it is known in what company it will be: shall heads read along?"""
        if self.drafting.could_be_read(request):
            company = min(len(self.scheduler.running) + len(self.scheduler.waiting), self.scheduler.max_num_seqs)
            began = time.perf_counter()
            room = self._plan.room(self.config.max_batch_tokens)  # in the last step
            worth_reading = self.policy.enlist(request, Load(company, 0, 0, len(request.prompt), room))
            self._welcoming += time.perf_counter() - began
            if worth_reading:
                self.drafting.enlist(request)
            else:
                self.drafting.excuse(request)
        request.space = self.drafting.space(request)

    def _set_aside(self, request: Request) -> None:
        """All of it will be computed anew. So it can be read, even if heads rested."""
        self._book(request)
        request.booked = None
        if self.drafting.could_be_read(request):
            self.drafting.enlist(request)
            request.unread = None

    def check(self, request: Request) -> None:
        """Say what is wrong with a request; changes nothing, so any thread may ask."""
        self.drafting.check(request)
        if not request.prompt:
            raise BadInput("The prompt is empty: give at least one token.")
        bad = next((t for t in request.prompt if not 0 <= t < self.runner.vocab_size), None)
        if bad is not None:
            raise BadInput(f"Token {bad} of the prompt is outside the vocabulary of {self.runner.vocab_size}.")
        if not self.scheduler.fits(len(request.prompt)):
            raise BadInput(
                f"The prompt has {len(request.prompt)} tokens; this engine takes at most {self.max_len - 1} "
                f"(model and KV memory allow {self.max_len} with the answer). Shorten it or raise kv_memory."
            )
        wild = next((t for t in request.params.logit_bias or {} if not 0 <= t < self.runner.vocab_size), None)
        if wild is not None:
            raise BadInput(f"logit_bias names token {wild}, outside the vocabulary of {self.runner.vocab_size}.")
        if request.params.stop and self.delivery.decode is None:
            raise BadInput("Stop strings need a tokenizer; this engine was given none. Use stop_token_ids.")

    def abort(self, request: Request) -> None:
        """Forget a request at once; its KV is free before the next step."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._leave(request)
            self.delivery.forget(request)

    def close(self) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        self._flight, self._parcels = None, []
        try:
            self.at_end()
        finally:
            self.drafting.close()
            self.runner.release()

    @property
    def seconds(self) -> dict[str, float]:
        """Of all steps so far, by what they went into."""
        return dict(zip(LAPS, self._seconds, strict=False))

    @property
    def in_flight(self) -> bool:
        """A step is on its way, and a device works on it."""
        return self._flight is not None

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._flight is None and not self._parcels

    # ------------------------------------------------------------------ the step
    def step(self) -> list[tuple[Request, Chunk | Exception]]:
        """Launch one target forward for every planned request, settle what is known, and return what is new."""
        with self.runner.at_work():
            return self._step()

    def _step(self) -> list[tuple[Request, Chunk | Exception]]:
        before = self._flight
        try:
            self._flight = self._next(before)
            if before is not None and not before.settled:
                self._settle(before, self._flight.clock if self._flight is not None else None)
            if self._flight is not None and self._flight.forward.landing is None:
                self._settle(self._flight)
        except Exception as error:
            failed = self._abandon(before)
            if not self._retry(failed, error):
                raise StepFailed(failed) from error
        return self._deliver()

    def _next(self, before: Flight | None) -> Flight | None:
        """Launch a step: right behind the last one where that may be, else when it is settled."""
        clock = Clock(self._wait)
        if before is None:
            return self._launch(None, clock)
        if self._may_repeat(before, clock):
            if (flight := self._repeat(before, clock)) is not None:
                return flight
        elif self._can_follow(before, clock):
            return self._launch(before, clock)
        self._settle(before, clock)
        return self._launch(None, Clock(self._wait, clock.laps["policy"]))

    def _launch(self, before: Flight | None, clock: Clock) -> Flight | None:
        """Plan, draft, and send one forward on its way; behind `before`, on placeholders, where that is not settled."""
        if before is not None:
            self._expect(before)
        self._welcoming = 0.0
        plan = self._plan = self.scheduler.plan()
        if not plan.parts:
            return None
        self._seat(plan, before)
        clock.lap("host")
        clock.move(self._welcoming, "host", "policy")
        drafted = self._draft(plan, before is not None, clock)
        stops = self._run_on(plan, drafted)
        again = self._reserve_ahead(plan, drafted)
        batch, roots = self._pack(plan, drafted.trees)
        batch.stops, batch.hidden_layers = stops, self._taps(plan)
        read = self._read_ahead(plan, batch)
        chosen = self._choice(plan, drafted, batch, roots) if self.runner.chooses else [False] * len(plan.ready)
        if before is not None or drafted.mail:
            batch.source = _sources(plan, before, batch)
            batch.mail = _mail_sources(plan, drafted, batch)
        clock.lap("host")
        if before is not None:
            before.followed = True
        forward = self.runner.forward(batch)
        clock.lap("target")
        again = again if all(chosen) else 0
        follows = before is not None
        flight = Flight(
            plan, drafted, batch, roots, forward, clock, chosen, follows, read=read, again=again, stamp=self._stamp
        )  # fmt: skip
        self._lines = flight.lines
        return flight

    def _read_ahead(self, plan: Plan, batch: Batch) -> bool:
        """Let drafters read prompts as a part of the forward that computes them, where they go on from there on the device: the
        token behind a prompt is the only one that nobody knows, and they will find it there."""
        if not batch.hidden_layers or self.texts is None:
            return False
        if self.runner.reader is None and self.drafting.reader is not None:  # it failed
            return False
        parts = zip(plan.parts, batch.segments, strict=True)
        own = [(p, s) for p, s in parts if p.has_prompt and self.drafting.reads(p.request)]
        if not all(self._can_draft_ahead(p.request) and self.drafting.reads_ahead(p.request) for p, _ in own):
            return False
        readings: list[tuple[Planned, Reading]] = []
        behind = np.full(len(batch.tokens), -1, np.int64)
        for part, segment in own:
            r, count = part.request, part.piece - part.ready
            rows = range(segment.start, segment.start + count)
            behind[rows.start : rows.stop] = r.tokens[r.computed + 1 : r.computed + count + 1]
            readings.append((part, Reading(r.id, r.tokens, r.computed, rows, count, NOTHING, unread=r.unread)))
        if readings:
            self.drafting.read_ahead(readings)
        if self.runner.reader is not None and any(len(reading.rows) for _, reading in readings):
            batch.behind = behind
        return True

    def _settle(self, flight: Flight, following: Clock | None = None) -> None:
        """Verdicts become tokens; KV, drafters and statistics follow. `following`: of the next step."""
        if flight is self._flight:
            self._flight = None
        for request in flight.expected:
            _drop_placeholder(request)
        if flight.forward.landing is not None:
            self._wait_for(flight, flight.forward.landing, following)
        flight.drafted.open_mail()
        if flight.forward.ran is not None:
            flight.drafted.trees = [Tree()]
        verdicts = self._verify(flight)
        if not flight.followed:
            self._lines = flight.lines  # where the host decided, the device does not know what was accepted
        flight.clock.lap("verify")
        self._commit(flight, verdicts)
        flight.clock.lap("host")
        self._account(flight, verdicts)
        flight.settled = True

    def _wait_for(self, flight: Flight, landing: Landing, following: Clock | None) -> None:
        """For the device. If it is still at work, it has waited for nothing that the policy did since it got this step.
        Meanwhile the policy learns, for as long as the device is seen at work. What it does behind that counts; where the
        device has the next step already, that one shows whether it waited for this."""
        began = seen = time.perf_counter()

        def busy() -> bool:
            nonlocal seen
            at_work = not landing.has_landed
            seen = time.perf_counter() if at_work else seen
            return at_work

        if watched := busy():
            self._hide(flight, following)
            self.policy.catch_up(busy)
        learning = time.perf_counter() - began if watched else 0.0
        late = time.perf_counter() - seen if watched and not busy() else 0.0
        landing.verdicts()
        self._landed = flight.clock.lap("target", since=self._landed)
        self.aside += max(0.0, learning - late)
        flight.clock.move(late, "target", "host" if flight.followed else "policy")
        if flight.followed:
            self._in_doubt = late

    def _hide(self, flight: Flight, following: Clock | None) -> None:
        """What the policy did while the device was at work is not counted."""
        if following is not None:
            self.aside += following.laps["policy"]
            following.move(following.laps["policy"], "policy", "host")
        if flight.follows:
            self.aside += self._learning
            self._learning = 0.0

    def _abandon(self, before: Flight | None) -> list[Request]:
        """A step broke: whoever had a part in it, or in one that is not settled, cannot go on."""
        flights = [f for f in dict.fromkeys((before, self._flight)) if f is not None and not f.settled]
        self._flight, self._lines = None, {}
        failed = {p.request.id: p.request for p in [*self._plan.parts, *(p for f in flights for p in f.plan.parts)]}
        for request in failed.values():  # pages that were promised may not hold what they say
            promised = sum(
                p.piece for f in flights for p in f.plan.parts if p.request in f.expected and p.request is request
            )
            self.pool.forget(request.id, max(0, request.computed - promised))
        return list(failed.values())

    def _retry(self, failed: Sequence[Request], error: Exception) -> bool:
        """Start over without whatever broke the step: with less at once where memory ran out, else with each request by itself
        first. False where there is nothing else to try."""
        short = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        self.setbacks["memory" if short else "step"] += 1
        if not (self.scheduler.spare(self._plan) if short else len(failed) > 1):
            return False
        log.error("a step with %d requests broke; they start over: %s", len(failed), error, exc_info=error)
        if short:
            self.runner.free_cached()
        for request in failed:
            _drop_placeholder(request)
            if self.texts is not None:
                self.texts.leave(request.id)
        self.scheduler.start_over([] if short else failed)
        return True

    def forget(self) -> None:
        """What requests that are over have left to later ones: their KV, and what drafters remember of their texts."""
        self.pool.forget_finished()
        for drafter in self.drafting.drafters.values():
            drafter.forget()

    def restart(self) -> list[Request]:
        """Something broke between steps, and nobody knows what holds. Who waits is kept, who runs is lost, and returned."""
        lost, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        self._flight, self._lines, self._parcels, self._plan = None, {}, [], Plan()
        for request in lost:
            request.finish_reason = "abort"
            for forget in (self.policy.release, self.drafting.release, self.delivery.forget):
                with contextlib.suppress(Exception):  # one of them may be what broke
                    forget(request)
            if self.texts is not None:
                self.texts.leave(request.id)
        for page in range(self.pool.num_pages):
            self.runner.freed(page)
        self._open(self.pool.num_pages)
        for request in waiting:
            request.computed, request.unread = 0, None
            self.scheduler.add(request)
        return lost

    def _open(self, num_pages: int) -> None:
        """Nobody is here, and all KV is free."""
        config, runner = self.config, self.runner
        self.pool = KVPool(num_pages, config.page_size, config.share_prefixes, runner.freed, runner.max_texts)
        self.max_len = min(self._longest, self.pool.num_slots - 1)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_batch_tokens, self.max_len)
        self.scheduler.welcome, self.scheduler.part_with = self._welcome, self._set_aside

    def _deliver(self) -> list[tuple[Request, Chunk | Exception]]:
        """What is new for each request; an error in making its text is its own."""
        parcels, self._parcels = self._parcels, []
        out: list[tuple[Request, Chunk | Exception]] = []
        for parcel in parcels:
            if parcel.request.finish_reason == "abort":
                continue
            try:
                out.append((parcel.request, self.delivery.chunk(parcel)))
            except Exception as error:
                self.abort(parcel.request)
                self.delivery.forget(parcel.request)
                out.append((parcel.request, error))
        return out

    # ------------------------------------------------------------------ one step behind another
    def _can_follow(self, flight: Flight, clock: Clock) -> bool:
        """May the next step be launched before this one is settled? Not if it needs to know this one's tokens."""
        if not all(flight.chosen) or not self.scheduler.all_fit(flight.drafted_for):
            return False
        if flight.batch.hidden_layers and not flight.read and flight.plan.has_prompts:
            return False  # hidden states of a prompt are read when the step is settled
        if any(not p.request.simple and self._wants_prompt(p.request) for p in flight.plan.parts):
            return False
        if not self._are_known(flight.plan.ready, flight.drafted.depth):
            return False
        if self._nobody_drafts:
            return True
        going = [
            p for p in flight.plan.ready if p.request.finish_reason is None and not self.scheduler.completes(p.request)
        ]
        ready = [p.request for p in going]
        room = (self.config.max_batch_tokens - len(ready)) // max(1, len(ready))
        load = Load(len(self.scheduler.running), len(self.scheduler.waiting), 0, room=room)
        clock.lap("host")
        wishes = self.policy.ask(ready, [{}] * len(ready), load)
        clock.lap("policy")
        if not self.drafting.anyone_reads and not any(wishes):
            return True
        return all(self._may_go_on(p, own) for p, own in zip(going, wishes, strict=True))

    def _may_repeat(self, flight: Flight, clock: Clock) -> bool:
        """Is the next step this one over again? Nobody came or went, nobody's drafts change, and there is room."""
        if not flight.again or flight.stamp != self._stamp or self.scheduler.may_admit:
            return False
        if any(self.scheduler.completes(p.request) for p in flight.plan.parts):
            return False
        return self.policy.holds() or self._wishes_stay(flight, clock)

    def _wishes_stay(self, flight: Flight, clock: Clock) -> bool:
        """The policy thinks anew, while the device is at work: does it wish for what it wished for?"""
        requests = [p.request for p in flight.plan.parts]
        clock.lap("host")
        wishes = self.policy.ask(requests, [{}] * len(requests), self._load(flight.plan))
        clock.lap("policy")
        return self.policy.holds() and wishes == flight.drafted.wishes

    @property
    def _stamp(self) -> tuple[int, int]:
        return self.scheduler.changes, self.drafting.changes

    def _repeat(self, before: Flight, clock: Clock) -> Flight | None:
        """Launch it; None where a drafter cannot."""
        self._expect(before)
        clock.lap("host")
        drafted = self.drafting.again(before.drafted, self._left_behind)
        clock.lap("draft")
        if drafted is None:
            return None
        for part, depth in zip(before.plan.parts, before.drafted.depth, strict=True):
            part.spare = depth
        self._plan, before.followed = before.plan, True
        batch = replace(before.batch, mail=drafted.all_mail()) if drafted.mail else before.batch
        clock.lap("host")
        forward = self.runner.again(batch)
        clock.lap("target")
        return replace(
            before, drafted=drafted, batch=batch, forward=forward, clock=clock, follows=True, expected=[],
            followed=False, again=before.again - 1,
        )  # fmt: skip

    def _reserve_ahead(self, plan: Plan, drafted: Drafted) -> int:
        """How many steps may repeat the one that is being launched: where each request has one row, and a draft if one was
        wished for. KV for them is reserved, where there is plenty."""
        if not self.runner.repeats or self.scheduler.may_admit or plan.has_prompts:
            return 0
        if not self.policy.holds() or not self.drafting.can_repeat(drafted, [p.request for p in plan.parts]):
            return 0
        if not self._are_known(plan.parts, drafted.depth):
            return 0
        most = 1 + max([*drafted.depth, *(d.mail.depth or 0 for d, _ in drafted.mail if d.mail is not None)])
        longest = max([len(p.request.tokens) + p.spare for p in plan.parts])
        last = max([p.request.limit - len(p.request.tokens) for p in plan.parts])
        steps = min(REPEATS, (self.max_len - longest) // most - 2, last)
        pages = self.pool.pages_for((steps + 2) * most) + 1
        if steps < 1 or 2 * pages * len(plan.parts) > self.pool.num_available:
            return 0
        for part, draft in zip(plan.parts, drafted.trees, strict=True):
            r = part.request
            self.pool.reserve(r.id, len(r.tokens) + part.spare + len(draft) + (steps + 1) * most)
        return steps

    @property
    def _nobody_drafts(self) -> bool:
        """Then nobody has to be asked, either."""
        return not self.drafting.drafters or (self.policy.quiet and not self.drafting.anyone_reads)

    def _may_go_on(self, part: Planned, wishes: Wishes) -> bool:
        """Can its next draft be made on the device? What a step left for a drafter to read is gone when the next one runs, so
        that drafter has to be asked there, or be done with this text."""
        request = part.request
        if part.seat >= 0 and self.drafting.is_served_ahead(request, wishes):
            return True
        if self.drafting.late(request, wishes):  # where it joins has to be known
            return False
        reading = [] if self.policy.rests(request) else self.drafting.readers(request)
        if not wishes and not reading:
            return True
        ahead = part.seat >= 0 and self.drafting.are_ahead({*wishes, *reading})
        return ahead or not (reading or self._drafts_for(request))

    def _are_known(self, parts: Sequence[Planned], depths: Sequence[int]) -> bool:
        """Will the device know all that their next step needs, and have room for it? This one may end a text: then the next
        one computes some rows in vain, which is less than to wait."""
        for part, depth in zip(parts, depths, strict=True):
            r = part.request
            if r.finish_reason is not None or (r.simple and not depth):
                continue
            if not sampling.is_sure(r) or r.params.logprobs is not None:
                return False
            if depth and (part.seat < 0 or len(r.tokens) + 2 * (depth + 1) >= self.max_len):
                return False
        return True

    def _can_draft_ahead(self, request: Request) -> bool:
        """Where the device chooses, it may draft."""
        return self.texts is not None and self._asks(request) and self.drafting.can_draft_ahead(request)

    def _seat(self, plan: Plan, before: Flight | None) -> None:
        """Give texts a place on the device where drafts are made there; what is on its way has one, or goes without. So does a
        text for which nobody drafts: it gets one when somebody is to."""
        more = before.drafted_for if before is not None else {}
        if self.texts is None or (self._nobody_drafts and not more):
            return
        seats = {p.request.id: p.seat for p in before.plan.ready} if before is not None else {}
        standing = []
        for part in plan.ready:
            r = part.request
            if r.id in seats:
                part.seat, part.spare = seats[r.id], more.get(r.id, 0)
            elif self._can_draft_ahead(r) and (self._is_awaited(part) or not self.policy.is_quiet(r)):
                standing.append(part)
        if standing:
            for part, seat in zip(standing, self.texts.sit(_sitter(p.request) for p in standing), strict=True):
                part.seat = seat

    def _is_awaited(self, part: Planned) -> bool:
        """Somebody reads it, and has to go on, or has only begun: then drafts may begin behind this step without a wait."""
        return self.drafting.reads(part.request) and (part.has_prompt or not self.policy.rests(part.request))

    def _expect(self, flight: Flight) -> None:
        """Go on as if every request had its next token, with room for all that it may have accepted."""
        more = flight.drafted_for
        for part in flight.plan.parts:
            r = part.request
            if r.finish_reason is None:
                if spare := more.get(r.id):
                    held = self.pool.reserve(r.id, len(r.tokens) + 1 + spare)
                    assert held, "there was room for everybody"
                r.computed += part.piece
                if part.ready:
                    r.tokens.append(PENDING)
                flight.expected.append(r)

    # ------------------------------------------------------------------ drafts
    def _draft(self, plan: Plan, follows: bool, clock: Clock) -> Drafted:
        """Ask drafters as long as the policy wishes, then let it choose. What only the device knows is taken whole."""
        ready = plan.ready
        out = Drafted(len(ready))
        if self._nobody_drafts:
            return out
        requests, load = [p.request for p in ready], self._load(plan)
        left = self._left_behind
        cut: list[tuple[dict[str, Tree], str]] = []  # there was no room to ask for these
        clock.lap("host")
        while any(wishes := self._wishes(plan, out, load, follows, clock)):
            wishes = self._reserve(plan, wishes, follows)
            clock.lap("host")
            self.drafting.propose(
                out, ready, wishes, self._depth, self.texts, lambda r: self.pool.tables[r.id].slots, left
            )
            for r, own, wished in zip(requests, out.proposals, wishes, strict=True):
                for name, wish in wished.items():
                    if name not in own:
                        own[name] = Tree()  # it was asked, and that is it
                    if r.form is not None:
                        own[name] = r.form.prune(r.output, own[name])
                    if not wish.nodes:
                        cut.append((own, name))
            clock.lap("draft")
        if not (out.asked or self.policy.cuts):  # nobody drafts
            return out
        for own, name in cut:
            if not len(own[name]):
                del own[name]
        clock.lap("host")
        trees = out.whole() if out.mail else self.policy.choose(requests, out.proposals, load)
        clock.lap("host" if out.mail else "policy")
        if self.policy.cuts:
            self.scheduler.reserve_drafts(plan, [len(t) for t in trees])
            trees = [tree.prune(t, p.budget, len(t)) for t, p in zip(trees, ready, strict=True)]
        out.settle_on(self._thin(trees))
        clock.lap("host")
        return out

    @property
    def _left_behind(self) -> Left | None:
        """By the last forward, for drafters on the device."""
        return Left(self.runner.left, self._lines) if self.runner.left is not None else None

    def _wishes(self, plan: Plan, out: Drafted, load: Load, follows: bool, clock: Clock) -> list[Wishes]:
        """Whom the policy wants to ask. Behind a step on its way, drafters that read along are asked in any case: what that
        step leaves for them is gone when the next one runs. One that rested joins in this step, and drafts from the next on."""
        requests = [p.request for p in plan.ready]
        wishes = self.policy.ask(requests, out.proposals, load)
        clock.lap("policy")
        if any(out.proposals) or not self.drafting.taps:
            return wishes
        wishes = list(wishes)
        for i in self.drafting.at_odds(requests, wishes):
            part, own, r = plan.ready[i], wishes[i], requests[i]
            if late := self.drafting.late(r, own):
                wishes[i] = {name: wish for name, wish in own.items() if name not in late}
                if not follows:
                    self.drafting.join(r, late)
            elif names := [n for n in self.drafting.readers(r) if n not in own]:
                if part.has_prompt:  # of which the last step left nothing, or what was read at once
                    continue
                if self.policy.rests(r):
                    read = self.drafting.rest(r)
                    r.unread = read if r.unread is None else r.unread
                    self.pool.leave_unread(r.id, read)  # who goes on from here is to know
                elif follows and part.seat >= 0:
                    wishes[i] = own | dict.fromkeys(names, Wish(0, 0))
        return wishes

    def _reserve(self, plan: Plan, wishes: list[Wishes], follows: bool) -> list[Wishes]:
        """The wishes that there is KV for. A step that follows one on its way can be drafted for on the device alone."""
        able = [p.seat >= 0 if follows else self._drafts_for(p.request) for p in plan.ready]
        most = [max([w.nodes for w in own.values()], default=0) for own in wishes]
        self.scheduler.reserve_drafts(plan, [n if can else 0 for n, can in zip(most, able, strict=True)])
        return [
            own if wanted <= p.budget else {n: replace(w, nodes=min(w.nodes, p.budget)) for n, w in own.items()}
            for p, own, wanted in zip(plan.ready, wishes, most, strict=True)
        ]

    def _load(self, plan: Plan) -> Load:
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return plan.load(running, waiting, self.config.max_batch_tokens)

    def _run_on(self, plan: Plan, drafted: Drafted) -> frozenset[int] | None:
        """Let the runner choose some tokens in one step, where nobody waits for a turn and nothing is drafted: what surrounds
        a forward is then paid once. Returns what ends it."""
        if not self.runner.runs_on or len(plan.parts) > 1 or len(self.scheduler.running) > 1 or self.scheduler.waiting:
            return None
        (part,) = plan.parts
        r, count = part.request, min(RUN_ON, int(RUN_ON_SECONDS / self._pace)) if self._pace else 0
        if part.piece > 1 or not part.ready or not r.num_output or len(drafted.trees[0]):
            return None
        if not r.params.greedy or r.params.stop or r.params.logprobs is not None or not sampling.can_ask(r):
            return None
        more = min(count, self._left(r)) - 1
        if more < 1 or (self._drafts_for(r) and not self.policy.is_quiet(r)):
            return None
        if not self.pool.reserve(r.id, len(r.tokens) + more):
            return None
        drafted.trees = [Tree.chain([PENDING] * more)]
        return r.stop_ids

    def _thin(self, trees: list[Tree]) -> list[Tree]:
        """Trees become chains where the runner would rather have them, or cannot take so many paths."""
        runner = self.runner
        if runner.most_paths is None or all(tree.is_chain(t.parents) for t in trees):
            return trees
        asked = self.drafting.config.tree or not runner.prefers_chains
        if not asked or sum(tree.num_paths(t) for t in trees) > runner.most_paths:
            return [tree.first_path(t) for t in trees]
        return trees

    def _drafts_for(self, request: Request) -> bool:
        return self._left(request) > 1 and bool(self.drafting.choices(request))

    def _left(self, request: Request) -> int:
        """Tokens until the request's own limits end it."""
        return request.limit - len(request.tokens)

    def _depth(self, part: Planned) -> int:
        """Tokens that a draft could contribute."""
        return max(0, self._left(part.request) - part.spare - 1)

    # ------------------------------------------------------------------ target forward
    def _taps(self, plan: Plan) -> tuple[int, ...]:
        """The layers whose hidden states somebody reads."""
        drafting = self.drafting
        reads = drafting.anyone_reads and any(drafting.reads(p.request) for p in plan.parts)
        return drafting.taps if reads else ()

    def _pack(self, plan: Plan, trees: list[Tree]) -> tuple[Batch, list[int]]:
        """Prefill pieces and trees in one row of tokens; and where the logits of each part's last known token will stand."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments: list[Segment] = []
        roots: list[int] = []
        grown, tables = iter(trees), self.pool.tables
        for part in plan.parts:
            r, start, piece = part.request, len(tokens), part.piece
            draft, context, table = next(grown) if part.ready else NO_TREE, r.computed, tables[r.id]
            size, base = len(draft.tokens), context + piece
            if piece == 1:
                tokens.append(r.tokens[context])
                positions.append(context)
            else:
                tokens += r.tokens[context:base]
                positions += range(context, base)
            parents = None
            if size:
                tokens += draft.tokens
                parents = _parents(piece, draft)
                chain = range(base, base + size)
                positions += chain if parents is None else [base + d - 1 for d in tree.depths(draft.parents)]
            stop = start + piece + size
            slots = table.slots[: base + size]
            segments.append(Segment(start, stop, context, slots, parents, part.seat, table.numbers, part.spare > 0))
            span = piece if not r.simple and self._wants_prompt(r) else int(part.ready)  # known tokens that are asked
            roots.append(len(rows) + span - 1)
            rows += range(start + piece - span, stop)
        batch = Batch(np.array(tokens, np.int64), np.array(positions, np.int64), segments, np.array(rows, np.int64))
        return batch, roots

    def _choice(self, plan: Plan, drafted: Drafted, batch: Batch, roots: list[int]) -> list[bool]:
        """Let the runner choose for the requests that it can serve. Returns for which ready parts it will."""
        choice = batch.choice = Choice.of(len(batch.rows), len(plan.parts))
        chosen: list[bool] = []
        asked: list[tuple[Request, int, int]] = []
        grown = iter(drafted.trees)
        for i, (part, root) in enumerate(zip(plan.parts, roots, strict=True)):
            if not part.ready:
                continue
            r, size = part.request, len(next(grown).tokens)
            chosen.append(self._asks(r))
            if chosen[-1]:
                choice.nodes[i] = size
                asked.append((r, root, 1 + size))
        sampling.ask(choice, asked)
        return chosen

    def _asks(self, request: Request) -> bool:
        """Let the runner choose for this request? Under `deterministic` only where it, and nobody else, always will."""
        if self._rejects(request):
            return False
        if request.simple:
            return True
        if self.config.deterministic and request.params.min_tokens:
            return False
        return sampling.is_sure(request) if self.config.deterministic else sampling.can_ask(request)

    def _rejects(self, request: Request) -> bool:
        return self.drafting.verification(request) == "rejection" and not request.params.greedy

    @staticmethod
    def _wants_prompt(request: Request) -> bool:
        """This step's rows also tell log p of prompt tokens."""
        return request.params.prompt_logprobs is not None and request.computed < len(request.prompt)

    # ------------------------------------------------------------------ verify
    def _verify(self, flight: Flight) -> list[Verdict]:
        """One verdict for each ready part: the runner's own where it chose, the others by rejection or a walk here."""
        landing, forward, drafted = flight.forward.landing, flight.forward, flight.drafted
        if forward.ran is not None:
            return [Verdict([], forward.ran[-1])]
        told = landing.verdicts() if landing is not None else [None] * len(flight.roots)
        ready = [(p, x, v) for p, x, v in zip(flight.plan.parts, flight.roots, told, strict=True) if p.ready]
        flight.chosen = [v is not None for _, _, v in ready]
        walking: list[tuple[int, int]] = []
        lines: list[sampling.Row] = []
        index: list[int] = []
        verdicts: list[Verdict | None] = [v for _, _, v in ready]
        for i, ((part, root, verdict), draft) in enumerate(zip(ready, drafted.trees, strict=True)):
            if verdict is not None:
                continue
            own = [sampling.Row(part.request, p) for p in _paths(draft)]
            if self._rejects(part.request):
                logp = sampling.log_probabilities(forward.logits[root : root + 1 + len(draft)], own)
                verdicts[i] = verify.reject(draft, logp, drafted.logq(i), self._chance(part.request))
            else:
                walking.append((i, len(lines)))
                lines += own
                index += range(root, root + 1 + len(draft))
        if walking:
            logits = forward.logits if len(index) == len(forward.logits) else forward.logits[index]
            choices = self._choose(logits, lines)
            for i, at in walking:
                draft = drafted.trees[i]
                verdicts[i] = verify.walk(draft, choices[at : at + 1 + len(draft)])
        return [v for v in verdicts if v is not None]

    def _choose(self, logits: torch.Tensor, lines: list[sampling.Row]) -> list[int]:
        """The tokens of these rows; row by row under `deterministic`, since a library's sums depend on how many there are."""
        if not self.config.deterministic:
            return sampling.choose(logits, lines)
        return [sampling.choose(logits[i : i + 1], [line])[0] for i, line in enumerate(lines)]

    @staticmethod
    def _chance(request: Request) -> Chance:
        return Chance(derive_seed(request.seed, "verify"), len(request.tokens))

    # ------------------------------------------------------------------ commit
    def _commit(self, flight: Flight, verdicts: list[Verdict]) -> None:
        """Tokens join the requests, accepted KV moves up, drafters hear the verdict."""
        drafted, forward, moves = flight.drafted, flight.forward, []
        ready = iter(zip(drafted.trees, verdicts, flight.chosen, strict=True))
        went_on, grew = {r.id for r in flight.expected}, []
        reads = bool(flight.batch.hidden_layers)
        starts = [_start(p, s) for p, s in zip(flight.plan.parts, flight.batch.segments, strict=True)] if reads else []
        for part, root in zip(flight.plan.parts, flight.roots, strict=True):
            draft, verdict, chosen = next(ready) if part.ready else (NO_TREE, NO_VERDICT, True)
            r = part.request
            if r.finish_reason is not None:  # it ended while this step was on its way
                continue
            if not r.simple and self._wants_prompt(r):
                self._prompt_logprobs(part, forward.logits[root + 1 - part.piece : root + 1])
            if forward.ran is not None:
                self._emit_run(r, forward.ran)
                grew.append(r)
            elif part.ready:
                count = self._emit(r, draft, verdict, forward, root)
                kept = self._accept(r, verdict, count)
                if not chosen and kept:  # a runner that chose has moved them
                    moves.append(self.pool.moves(self.pool.tables[r.id].slots, len(r.tokens) - count, kept))
                if self.texts is not None and part.seat >= 0 and chosen:
                    self.texts.grew(r.id, len(r.tokens))
                grew.append(r)
            elif r.id not in went_on:
                r.computed += part.piece
        if moves:
            self.runner.move(np.concatenate([m[0] for m in moves]), np.concatenate([m[1] for m in moves]))
        for r in grew:  # not before nodes have moved out of the pages that go
            if r.id not in went_on:
                self.runner.keep(self.pool.tables[r.id].slots, r.computed)
                self.pool.trim(r.id, len(r.tokens))
        if reads:
            readings = self._readings(flight, verdicts, starts)
            if flight.read and not flight.followed:
                readings = _unread(readings)
            self.drafting.read(readings, None if flight.followed else forward.hidden)
        self.drafting.observe(drafted, verdicts)
        for part in flight.plan.ready:
            r = part.request
            if r.finish_reason is not None and r.id in self.pool.tables:
                self.pool.seal(r.id, r.tokens, r.computed, r.space, r.unread)  # for whoever goes on from here
                self._leave(r)

    def _readings(self, flight: Flight, verdicts: list[Verdict], starts: list[int]) -> list[tuple[Planned, Reading]]:
        """Which rows of the forward stand for what lies in KV now. `starts`: where the first of each part stands. Where the
        next step is on its way, nobody asks for rows: how far texts have come is enough."""
        if flight.followed:
            read = [(p, p.request) for p in flight.plan.parts if self.drafting.reads(p.request)]
            alive = [(p, r) for p, r in read if r.id in self.pool.tables]
            return [(p, Reading(r.id, r.tokens, r.computed, (), 0, NOTHING)) for p, r in alive]
        out, ready = [], iter(verdicts)
        for part, segment, at in zip(flight.plan.parts, flight.batch.segments, starts, strict=True):
            r, accepted = part.request, next(ready).accepted if part.ready else []
            if r.id in self.pool.tables:
                root, ends = segment.start + part.piece, r.finish_reason is not None
                rows = [*range(segment.start, root), *(root + n for n in accepted)][: r.computed - at]
                out.append((part, Reading(r.id, r.tokens, at, rows, part.piece, self._slots(r), ends, r.unread)))
        return out

    def _slots(self, request: Request) -> np.ndarray:
        return self.pool.slots(request.id, request.computed)

    @staticmethod
    def _accept(request: Request, verdict: Verdict, num_new: int) -> list[int]:
        """The nodes that were accepted and count; the tokens before this step's, and theirs, lie in KV now."""
        kept = verdict.accepted[:num_new]
        request.computed = len(request.tokens) - num_new + len(kept) - (len(kept) == num_new)
        return kept

    def _emit(self, request: Request, draft: Tree, verdict: Verdict, forward: Forward, root: int) -> int:
        """Append the verdict's tokens up to the first that ends the text, and send them on their way. Returns how many."""
        accepted, stats = verdict.accepted, request.stats
        new = verdict.tokens(draft) if accepted else [verdict.bonus]
        kept = self._append(request, new)
        first = not stats.tokens
        stats.tokens += kept
        stats.record(draft.origins or (), accepted[:kept])
        if first:
            stats.time_to_first_token = time.perf_counter() - request.arrived
            stats.first_tokens = kept
        if request.params.logprobs is not None:
            at = [root, *(root + 1 + n for n in accepted)][:kept]
            request.logprobs += sampling.logprobs(forward.logits[at], new[:kept], request.params.logprobs)
        if request.streams or request.finish_reason is not None:
            self._post(request, new[:kept], accepted, draft)
        return kept

    def _emit_run(self, request: Request, ran: list[int]) -> None:
        """The same for tokens that the runner chose one after the other: as many steps of one token."""
        kept = self._append(request, ran)
        request.computed = len(request.tokens) - 1
        request.stats.tokens += kept
        request.stats.steps += kept
        self._post(request, ran[:kept], [], NO_TREE)

    def _post(self, request: Request, new: list[int], accepted: list[int], draft: Tree) -> None:
        """To be delivered: each piece where somebody reads along, else the whole when it is there."""
        if request.streams:
            drafted = [i < len(accepted) for i in range(len(new))]
            told = request.logprobs[-len(new) :] if request.params.logprobs is not None else None
            parcel = Parcel(request, new, drafted, request.finish_reason, told)
            if request.shows_drafts:  # the tree itself may be written over by the next step
                parcel.draft, parcel.accepted = draft.copy(), accepted[: len(new)]
            self._parcels.append(parcel)
        elif request.finish_reason is not None:
            self._parcels.append(Parcel(request, request.output, [], request.finish_reason))

    def _append(self, request: Request, new: list[int]) -> int:
        """Tokens join the text, up to the first that ends it. Returns how many did."""
        tokens = request.tokens
        if len(tokens) + len(new) < request.limit and not request.params.stop and request.stop_ids.isdisjoint(new):
            tokens += new
            return len(new)
        for kept, token in enumerate(new, 1):
            request.tokens.append(token)
            if self._ends(request, token):
                return kept
        return len(new)

    def _ends(self, request: Request, token: int) -> bool:
        """Does this token end the text? Says why on the request."""
        p = request.params
        if (stop := self.delivery.stops(request, token)) is not None:
            request.finish_reason, request.stop_reason = "stop", stop
        elif token in request.stop_ids:
            request.finish_reason = "stop"
            request.stop_reason = token if token in p.stop_token_ids else None
        elif len(request.tokens) >= request.limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _prompt_logprobs(self, part: Planned, logits: torch.Tensor) -> None:
        """Row j tells log p of the prompt token behind it; the first token has none."""
        r = part.request
        r.prompt_logprobs = r.prompt_logprobs[: r.computed + 1] or [None]  # a resumed request tells them once
        following = r.prompt[r.computed + 1 : r.computed + part.piece + 1]
        r.prompt_logprobs += sampling.logprobs(logits[: len(following)], following, r.params.prompt_logprobs or 0)

    def _leave(self, request: Request) -> None:
        """A request is over: free everything that is kept for it, but the text that is still to be delivered."""
        _drop_placeholder(request)
        self.scheduler.finish(request)
        if self.texts is not None:
            self.texts.leave(request.id)
        self._book(request)
        request.stats.time_total = time.perf_counter() - request.arrived if request.arrived else 0.0
        self.policy.release(request)
        self.drafting.release(request)

    def _account(self, flight: Flight, verdicts: list[Verdict]) -> None:
        """What the step cost and brought. Its seconds are counted once for all, and told to each request when it leaves."""
        laps, late = flight.clock.laps, self._learning
        laps["policy"] += late
        self._learning, self._in_doubt = self._in_doubt, 0.0
        for part in flight.plan.parts:
            if part.request.booked is None:
                self._open_book(part.request, flight.clock.began)
        for i, name in enumerate(LAPS):
            self._seconds[i] += laps[name]
        now = time.perf_counter()
        period = now - max(flight.clock.began, self._settled)
        self._settled = now
        ran = len(flight.forward.ran or ())
        rows, prefill = 1 if ran else len(flight.batch.tokens), flight.plan.num_prefill_tokens
        target, around = laps["target"] / max(1, ran), period - laps["target"]
        self._pace = target + around if rows == 1 else self._pace
        reach = 0.0 if ran else float(sum([(s.stop - s.start) * s.context for s in flight.batch.segments]))
        produced = len(verdicts) + sum([len(v.accepted) for v in verdicts])
        times = StepTimes(
            laps["draft"], target, laps["verify"], laps["host"], rows, prefill, target + around, reach,
            tuple(flight.drafted.errands), produced, laps["policy"],
            flight.drafted.wishes, [len(t) for t in flight.drafted.trees], late,
        )  # fmt: skip
        requests = [p.request for p in flight.plan.ready]
        if not prefill and not ran:
            self._compare(requests, verdicts if produced > len(verdicts) else (), period)
        for part in flight.plan.parts:
            if part.request.finish_reason is not None:
                self._book(part.request)
        began = time.perf_counter()
        self.policy.learn(times, requests, verdicts)
        self._learning += time.perf_counter() - began
        if self.watch is not None:
            self.watch(times, flight.drafted.trees, verdicts)

    def _compare(self, requests: Sequence[Request], verdicts: Sequence[Verdict], period: float) -> None:
        """What plain steps would have taken for these tokens, beside what this one took. No verdicts: nothing was accepted."""
        context = sum([len(r.tokens) for r in requests]) / len(requests)
        plain = self.policy.plain_seconds(len(requests), context)
        if not plain:
            return
        self._seconds[COMPARED] += period
        self._seconds[PLAIN] += plain
        for r, verdict in zip(requests, verdicts, strict=False):
            if verdict.accepted:
                r.stats.time_plain += plain * len(verdict.accepted)

    def _open_book(self, request: Request, began: float) -> None:
        """From here on, it takes part in every step."""
        request.booked = tuple(self._seconds)
        request.stats.time_queue = request.stats.time_queue or began - request.arrived

    def _book(self, request: Request) -> None:
        """Tell its statistics what was counted since the last time."""
        if (before := request.booked) is None:
            return
        request.booked = tuple(self._seconds)
        for name, now, then in zip((*LAPS, "compared", "plain"), request.booked, before, strict=True):
            setattr(request.stats, f"time_{name}", getattr(request.stats, f"time_{name}") + now - then)

    def check_integrity(self) -> None:
        """Slots, tables and requests agree."""
        self.pool.check_integrity()
        held = set(self.pool.tables)
        assert held <= {r.id for r in self.scheduler.running}, "a table without a running request"
        for r in self.scheduler.running:
            assert r.computed < len(r.tokens) and len(self.pool.tables[r.id].slots) >= r.computed


def _start(part: Planned, segment: Segment) -> int:
    """Where a part's first row stands, before its tokens are appended. A step that was launched behind another one's draft
    may stand further on than the host wrote."""
    return len(part.request.tokens) - part.piece if part.ready else segment.context


def _unread(readings: Sequence[tuple[Planned, Reading]]) -> list[tuple[Planned, Reading]]:
    """What is left to read of a step whose prompts were read while it was on its way."""
    out = []
    for part, reading in readings:
        if part.piece == 1 and part.ready:
            out.append((part, reading))
        elif part.ready and reading.rows:
            out.append((part, replace(reading.last(), known=1)))
    return out


def _sitter(request: Request) -> Sitter:
    heat = 0.0 if request.params.greedy else request.params.temperature
    return Sitter(request.id, request.tokens, heat, request.seed)


def _drop_placeholder(request: Request) -> None:
    if request.tokens and request.tokens[-1] == PENDING:
        request.tokens.pop()


def _sources(plan: Plan, before: Flight | None, batch: Batch) -> np.ndarray:
    """For each row of the next forward, the row of the last one that chose its token; -1 where the token is known, or will
    be put in with the rows' places."""
    source = np.full(len(batch.tokens), -1, np.int64)
    if before is None:
        return source
    last = {p.request.id: s.stop - 1 for p, s in zip(before.plan.parts, before.batch.segments, strict=True) if p.ready}
    for part, segment in zip(plan.parts, batch.segments, strict=True):
        if part.request.tokens[-1] == PENDING and not part.spare:
            source[segment.start + part.piece - 1] = last[part.request.id]
    return source


def _mail_sources(plan: Plan, drafted: Drafted, batch: Batch) -> torch.Tensor | None:
    """The same for drafts that only the device knows yet. Returns the mail."""
    where, mail = drafted.sources()
    ready = [s for p, s in zip(plan.parts, batch.segments, strict=True) if p.ready]
    assert batch.source is not None
    for i, (places, sized, grown) in where.items():
        batch.source[ready[i].stop - len(places) : ready[i].stop] = places
        ready[i].sized, ready[i].grown = (sized if places else -1), (grown if len(places) > 1 else -1)
    return mail


def _parents(piece: int, draft: Tree) -> np.ndarray | None:
    """Parents over a span of known tokens and the tree behind it; None for a plain chain."""
    if tree.is_chain(draft.parents):
        return None
    span = list(range(-1, piece - 1))
    return np.array(span + [piece - 1 if p < 0 else piece + p for p in draft.parents], dtype=np.int64)


def _paths(draft: Tree) -> list[list[int]]:
    """The draft tokens before each row: none for the root, the path down to and including node i for row i + 1."""
    out: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        out.append([*out[parent + 1], token])
    return out
