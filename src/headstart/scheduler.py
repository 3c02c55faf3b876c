"""Who runs in this step, and how much of each prompt. Numbers, no tensors.

A request has known tokens (prompt and output so far) of which the first `computed` lie in KV. A *piece* is how many of
the others this step computes. A piece that reaches the last known token lets the request choose its next one; drafts
hang behind it. So prefill, decoding and resuming after a preemption are one rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headstart.core import PENDING, Request
from headstart.kv import KVPool
from headstart.policy import Load

LEAST_TOKENS = 16  # of a step, however short memory is
GROWS = 64  # steps after which one more request may run, once memory ran out


@dataclass(eq=False, slots=True)
class Planned:
    """One request's part of the step."""

    request: Request
    piece: int
    ready: bool  # the step reaches the request's last token: it will choose the next
    budget: int = 0  # draft nodes for which there is KV
    spare: int = 0  # tokens that the step before may have accepted, besides the one that is known to come
    seat: int = -1  # of its text on the device

    @property
    def has_prompt(self) -> bool:
        """Is more computed than the last token of a text that goes on, or the last one of a prompt?"""
        return self.piece > 1 or not self.ready or not self.request.num_output


@dataclass
class Plan:
    parts: list[Planned] = field(default_factory=list)
    ready: list[Planned] = field(default_factory=list)  # of them
    num_tokens: int = 0

    def add(self, part: Planned) -> None:
        self.parts.append(part)
        self.num_tokens += part.piece
        if part.ready:
            self.ready.append(part)

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens > len(self.ready) or any(not p.request.num_output for p in self.parts)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - len(self.ready)

    def load(self, num_running: int, num_waiting: int, max_batch_tokens: int) -> Load:
        """How busy this step is."""
        count = max(1, len(self.ready))
        context = sum([len(p.request.tokens) for p in self.ready]) / count
        return Load(num_running, num_waiting, self.num_prefill_tokens, context, self.room(max_batch_tokens))

    def room(self, max_batch_tokens: int) -> int:
        """Rows that are left for the draft of each request."""
        return (max_batch_tokens - self.num_tokens) // max(1, len(self.ready))


class Scheduler:
    def __init__(self, pool: KVPool, max_num_seqs: int, max_batch_tokens: int, max_len: int) -> None:
        self.pool, self.max_num_seqs, self.max_batch_tokens, self.max_len = (
            pool,
            max_num_seqs,
            max_batch_tokens,
            max_len,
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.changes = 0  # of who runs
        self.welcome: Callable[[Request], None] = lambda request: None  # hears of each that is next in line, once,
        self.part_with: Callable[[Request], None] = lambda request: None  # and of each that is set aside
        self._new: set[str] = set()  # those of whom it has not heard
        self._suspects: dict[str, tuple[Request, int]] = {}  # of a step that broke, and how many tokens they had then
        self._spared: list[int] | None = None  # requests and tokens of a step at most, since memory ran out
        self._steps = 0  # since then

    # -------------------------------------------------------------- coming and going
    def add(self, request: Request) -> None:
        request.limit = min(len(request.prompt) + request.params.max_tokens, self.max_len)
        self.waiting.append(request)
        self._new.add(request.id)

    def fits(self, num_prompt: int) -> bool:
        """Could a prompt of this length ever run, with room for one more token?"""
        return self.pool.pages_for(num_prompt + 1) <= self.pool.num_pages and num_prompt < self.max_len

    def all_fit(self, more: Mapping[str, int]) -> bool:
        """Can every running request have all its tokens, one more, and these more in KV, so that nobody has to step aside?"""
        lacking = max([len(r.tokens) - r.computed for r in self.running], default=0)
        pages = 1 + self.pool.pages_for(
            1 + max(more.values(), default=0)
        )  # at most, for whoever lacks but the last token
        if lacking < 2 and len(self.running) * pages <= self.pool.num_available:
            return True
        missing = sum(self.pool.missing_pages(r.id, len(r.tokens) + 1 + more.get(r.id, 0)) for r in self.running)
        return missing <= self.pool.num_available

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its KV at once."""
        self.changes += 1
        self._new.discard(request.id)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.close(request.id)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def may_admit(self) -> bool:
        return bool(self._suspects) or (bool(self.waiting) and len(self.running) < self.most)

    @property
    def most(self) -> int:
        """Requests that may run at once."""
        return self.max_num_seqs if self._spared is None else min(self.max_num_seqs, self._spared[0])

    # -------------------------------------------------------------- when something goes wrong
    def start_over(self, suspects: Sequence[Request]) -> None:
        """Whoever runs is set aside. The suspects take a step by themselves each before they go on with the others: so one of
        them that breaks every step takes nobody along."""
        for request in reversed(self.running[:]):
            self._preempt(request)
        self._suspects = {r.id: (r, r.num_output) for r in suspects}

    def spare(self, plan: Plan) -> bool:
        """Memory ran out in this step: half as much at once from now on, and slowly more again. False: it was the least."""
        if len(plan.parts) < 2 and plan.num_tokens <= LEAST_TOKENS:
            return False
        self._spared = [max(1, len(plan.parts) // 2), max(LEAST_TOKENS, plan.num_tokens // 2)]
        self._steps = 0
        return True

    def _recover(self) -> None:
        """Memory may have become free."""
        if self._spared is None:
            return
        self._steps += 1
        if self._steps % GROWS == 0:
            self._spared = [self._spared[0] + 1, self._spared[1] + LEAST_TOKENS]
            if self._spared[0] >= self.max_num_seqs and self._spared[1] >= self.max_batch_tokens:
                self._spared = None

    def _suspect(self) -> Request | None:
        """The next that has to show that a step does not break with it."""
        for request, had in list(self._suspects.values()):
            has = request.num_output - (request.tokens[-1] == PENDING)
            if request.finish_reason is None and has <= had:
                return request
            del self._suspects[request.id]
        return None

    def _plan_alone(self, request: Request) -> Plan:
        plan = Plan()
        if request in self.running:
            self._continue(request, plan, self.max_batch_tokens)
            return plan
        while True:
            self.waiting.remove(request)
            self.waiting.appendleft(request)
            if self._admit(request, plan, self.max_batch_tokens) or not self.running:
                return plan
            self._preempt(self.running[-1])

    # -------------------------------------------------------------- one step
    def plan(self) -> Plan:
        """Running requests first, oldest first; then as many waiting ones as fit."""
        if self._suspects and (suspect := self._suspect()) is not None:
            return self._plan_alone(suspect)
        self._recover()
        plan, room = Plan(), self.max_batch_tokens
        if self._spared is not None:
            room = min(room, max(self._spared[1], len(self.running)))
        for request in list(self.running):
            is_here = request.id in self.pool.tables  # not set aside meanwhile
            if is_here and room > 0 and len(request.tokens) < request.limit:
                room -= self._continue(request, plan, room)
        while self.waiting and room > 0 and len(self.running) < self.most:
            used = self._admit(self.waiting[0], plan, room)
            if not used:
                break
            room -= used
        return plan

    def _continue(self, request: Request, plan: Plan, room: int) -> int:
        """Plan a running request; where KV is short, younger ones give theirs back."""
        piece = 1
        if len(request.tokens) - request.computed > 1:
            self._attach(request)
            piece = min(len(request.tokens) - request.computed, room)
        while not self.pool.reserve(request.id, request.computed + piece):
            victim = self.running[-1]  # never one that is planned already: those are older
            self._preempt(victim)
            if victim is request:
                return 0
        return self._take(request, plan, piece)

    def _admit(self, request: Request, plan: Plan, room: int) -> int:
        """Start a waiting request if its known tokens fit with one page to spare, unless it is alone."""
        if request.id in self._new:
            self._new.remove(request.id)
            self.welcome(request)
        self._attach(request)
        spare = 1 if self.running else 0
        missing = self.pool.missing_pages(request.id, len(request.tokens) + 1)
        piece = min(len(request.tokens) - request.computed, room)
        if missing + spare > self.pool.num_available or not self.pool.reserve(request.id, request.computed + piece):
            self.pool.close(request.id)
            request.computed, request.unread = 0, None
            return 0
        if not request.num_output:
            request.stats.cached_prompt_tokens = request.computed
        self.waiting.popleft()
        self.running.append(request)
        self.changes += 1
        return self._take(request, plan, piece)

    def _attach(self, request: Request) -> None:
        """Take over what others have computed of the same text; the last token is always computed anew, for its logits."""
        if request.params.prompt_logprobs is not None and request.computed < len(request.prompt):
            return
        if request.computed + 1 < len(request.tokens):
            last = len(request.tokens) - 1
            before = request.computed
            request.computed = self.pool.attach(request.id, request.tokens, before, last, request.space)
            if request.computed > before and request.unread is None:
                request.unread = self.pool.first_unread(request.id, request.computed)

    def completes(self, request: Request, more: int = 1) -> bool:
        """With so many more tokens, are all on their way? Then only the last one's name is missing."""
        return len(request.tokens) + more >= request.limit

    def _take(self, request: Request, plan: Plan, piece: int) -> int:
        known = request.computed + piece - (request.tokens[request.computed + piece - 1] == PENDING)
        self.pool.seal(request.id, request.tokens, known, request.space, request.unread)
        plan.add(Planned(request, piece, request.computed + piece == len(request.tokens)))
        return piece

    def _preempt(self, victim: Request) -> None:
        """Set a request aside: its KV goes, its tokens stay, it comes back first."""
        self.changes += 1
        self.running.remove(victim)
        self.pool.close(victim.id)
        victim.computed = 0
        victim.stats.preemptions += 1
        self.waiting.appendleft(victim)
        self.part_with(victim)

    def reserve_drafts(self, plan: Plan, budgets: list[int]) -> None:
        """Find KV for the drafts; a draft never pushes anyone out, it shrinks. Rows of the forward are bounded too."""
        room = self.max_batch_tokens - plan.num_tokens
        for part, wanted in zip(plan.ready, budgets, strict=True):
            r = part.request
            wanted = max(0, min(wanted, room))
            while wanted and not self.pool.reserve(r.id, len(r.tokens) + part.spare + wanted):
                wanted //= 2
            part.budget = wanted
            room -= wanted
