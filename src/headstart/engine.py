"""The step: plan, budget, draft, one target forward over all trees, verify, commit.

The engine knows requests, trees and verdicts. It does not know which drafter it has, how a runner computes, or who
reads the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart import sampling, tree, verify
from headstart.config import EngineConfig, SpeculativeConfig
from headstart.core import (
    Batch,
    Chunk,
    Forward,
    Request,
    Segment,
    Tree,
    Verdict,
)
from headstart.drafters import Surroundings
from headstart.drafting import Drafted, Drafting
from headstart.errors import BadInput
from headstart.kv import KVPool
from headstart.models.runner import TorchRunner
from headstart.noise import Chance, derive_seed
from headstart.policy import Load, Policy, StepTimes
from headstart.policy.fixed import FixedPolicy
from headstart.scheduler import Plan, Planned, Scheduler
from headstart.text import TextStream

TAIL = 5  # prompt tokens that the text of the first new one may depend on
Decode = Callable[[Sequence[int], bool], str]


class Clock:
    """Laps of one step. With `wait`, the device is waited for, so that a lap shows its own work."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self._wait, self.began = wait, time.perf_counter()
        self._last = self.began
        self.laps = {"host": 0.0, "draft": 0.0, "target": 0.0, "verify": 0.0}

    def lap(self, name: str) -> None:
        if self._wait:
            self._wait()
        now = time.perf_counter()
        self.laps[name] += now - self._last
        self._last = now


@dataclass(frozen=True)
class Place:
    """Where one part's rows stand among the logits: `span` rows of known tokens, the last of them the root, then nodes."""

    first: int
    span: int
    root: int


class StepFailed(Exception):
    """A step broke; these requests were in it. The cause is chained."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(f"a step with {len(requests)} requests failed")
        self.requests = requests


class Engine:
    def __init__(
        self,
        runner: TorchRunner,
        config: EngineConfig,
        max_len: int,
        num_pages: int,
        speculative: SpeculativeConfig | None = None,
        around: Surroundings | None = None,
        decode: Decode | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.runner, self.config, self.decode = runner, config, decode
        self.pool = KVPool(num_pages, config.page_size, config.share_prefixes)
        runner.allocate(self.pool.num_slots)
        self.max_len = min(max_len, self.pool.num_slots - 1)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_batch_tokens, self.max_len)
        self.drafting = Drafting(speculative or SpeculativeConfig(), around or Surroundings(runner.vocab_size))
        self.policy: Policy = policy or FixedPolicy(self.drafting.config)
        self._texts: dict[str, TextStream] = {}
        self._wait = runner.synchronize if config.profile else None

    # ------------------------------------------------------------------ coming and going
    def add(self, request: Request) -> None:
        """Take a request on; says what is wrong with it before anything is allocated."""
        self._check(request)
        self.drafting.choose(request)
        request.arrived = request.arrived or time.perf_counter()
        if self.decode is not None:
            p = request.params
            self._texts[request.id] = TextStream(
                lambda ids: self.decode(ids, p.skip_special_tokens),  # type: ignore[misc]
                p.stop,
                p.include_stop_str_in_output,
                request.prompt[-TAIL:],
            )
        self.scheduler.add(request)

    def _check(self, request: Request) -> None:
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
        if request.params.stop and self.decode is None:
            raise BadInput("Stop strings need a tokenizer; this engine was given none. Use stop_token_ids.")

    def abort(self, request: Request) -> None:
        """Forget a request at once; its KV is free before the next step."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._leave(request)

    def close(self) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        self.drafting.close()
        self.runner.keys, self.runner.values = [], []

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    # ------------------------------------------------------------------ the step
    def step(self) -> list[tuple[Request, Chunk]]:
        """Advance every planned request by one target forward. Returns what is new."""
        clock = Clock(self._wait)
        plan = self.scheduler.plan()
        if not plan.parts:
            return []
        try:
            return self._step(plan, clock)
        except Exception as error:
            for part in plan.parts:  # pages that this step promised may not hold what they say
                self.pool.forget(part.request.id, part.request.computed)
            raise StepFailed([p.request for p in plan.parts]) from error

    def _step(self, plan: Plan, clock: Clock) -> list[tuple[Request, Chunk]]:
        self._give_budgets(plan)
        clock.lap("host")
        drafted = self.drafting.propose(plan.ready, self._depth)
        clock.lap("draft")
        batch, places = self._pack(plan, drafted.trees)
        clock.lap("host")
        forward = self.runner.forward(batch)
        clock.lap("target")
        verdicts = self._verify(plan, drafted, forward, places)
        clock.lap("verify")
        chunks = self._commit(plan, drafted, verdicts, forward, places)
        clock.lap("host")
        self._account(plan, verdicts, clock, len(batch.tokens))
        return chunks

    def _give_budgets(self, plan: Plan) -> None:
        ready = [p.request for p in plan.ready]
        load = Load(len(self.scheduler.running), len(self.scheduler.waiting), plan.num_prefill_tokens)
        budgets = self.policy.budget(ready, load)
        wanted = [b if b and self._drafts_for(r) else 0 for b, r in zip(budgets, ready, strict=True)]
        self.scheduler.reserve_drafts(plan, wanted)

    def _drafts_for(self, request: Request) -> bool:
        return self._depth(request) > 0 and self.drafting.choose(request) is not None

    def _depth(self, request: Request) -> int:
        """Tokens that a draft could contribute before the request's own limits end it."""
        by_length = self.max_len - len(request.tokens) - 1
        return min(request.params.max_tokens - request.num_output - 1, by_length)

    # ------------------------------------------------------------------ target forward
    def _pack(self, plan: Plan, trees: list[Tree]) -> tuple[Batch, list[Place]]:
        """Prefill pieces and trees in one row of tokens; and where each part's logits will stand."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments: list[Segment] = []
        places: list[Place] = []
        grown = iter(trees)
        for part in plan.parts:
            r, start = part.request, len(tokens)
            draft = next(grown) if part.ready else Tree()
            base = r.computed + part.piece
            tokens += r.tokens[r.computed : base] + draft.tokens
            positions += range(r.computed, base)
            positions += [base + d - 1 for d in tree.depths(draft.parents)]
            slots = self.pool.slots(r.id, base + len(draft))
            segments.append(Segment(start, len(tokens), r.computed, slots, _parents(part.piece, draft)))
            span = part.piece if self._wants_prompt(r) else int(part.ready)  # rows of known tokens that are asked
            places.append(Place(len(rows), span, len(rows) + span - 1))
            rows += range(start + part.piece - span, len(tokens))
        batch = Batch(np.array(tokens, np.int64), np.array(positions, np.int64), segments, np.array(rows, np.int64))
        return batch, places

    @staticmethod
    def _wants_prompt(request: Request) -> bool:
        """This step's rows also tell log p of prompt tokens."""
        return request.params.prompt_logprobs is not None and request.computed < len(request.prompt)

    # ------------------------------------------------------------------ verify
    def _verify(self, plan: Plan, drafted: Drafted, forward: Forward, places: list[Place]) -> list[Verdict]:
        """One verdict for each ready part."""
        roots = [place.root for part, place in zip(plan.parts, places, strict=True) if part.ready]
        walking: list[tuple[int, int]] = []
        lines: list[sampling.Row] = []
        index: list[int] = []
        verdicts: list[Verdict | None] = [None] * len(roots)
        for i, (part, draft, root) in enumerate(zip(plan.ready, drafted.trees, roots, strict=True)):
            own = [sampling.Row(part.request, p) for p in _paths(draft)]
            where = range(root, root + 1 + len(draft))
            if self.drafting.verification(part.request) == "rejection" and not part.request.params.greedy:
                logp = sampling.log_probabilities(forward.logits[root : root + 1 + len(draft)], own)
                verdicts[i] = verify.reject(draft, logp, drafted.logq[i], self._chance(part.request))
            else:
                walking.append((i, len(lines)))
                lines += own
                index += where
        if walking:
            logits = forward.logits if len(index) == len(forward.logits) else forward.logits[index]
            choices = sampling.choose(logits, lines)
            for i, at in walking:
                draft = drafted.trees[i]
                verdicts[i] = verify.walk(draft, choices[at : at + 1 + len(draft)])
        return [v for v in verdicts if v is not None]

    @staticmethod
    def _chance(request: Request) -> Chance:
        return Chance(derive_seed(request.seed, "verify"), len(request.tokens))

    # ------------------------------------------------------------------ commit
    def _commit(
        self,
        plan: Plan,
        drafted: Drafted,
        verdicts: list[Verdict],
        forward: Forward,
        places: list[Place],
    ) -> list[tuple[Request, Chunk]]:
        """Tokens join the requests, accepted KV moves up, drafters hear the verdict, text goes out."""
        chunks, moves, ready = [], [], iter(zip(drafted.trees, verdicts, drafted.names, strict=True))
        for part, place in zip(plan.parts, places, strict=True):
            if self._wants_prompt(part.request):
                self._prompt_logprobs(part, forward.logits[place.first : place.first + place.span])
            if not part.ready:
                part.request.computed += part.piece
                continue
            draft, verdict, name = next(ready)
            chunk = self._emit(part.request, draft, verdict, name, forward.logits, place.root)
            moves.append(self._settle(part.request, verdict, len(chunk.token_ids)))
            chunks.append((part.request, chunk))
        if moves:
            self.runner.move(np.concatenate([m[0] for m in moves]), np.concatenate([m[1] for m in moves]))
        self.drafting.observe(drafted, verdicts)
        for request, chunk in chunks:
            if chunk.finish_reason is not None:
                self._leave(request)
        return chunks

    def _settle(self, request: Request, verdict: Verdict, num_new: int) -> tuple[np.ndarray, np.ndarray]:
        """Which slots move so that the accepted nodes stand in line; pages behind them go back."""
        base = len(request.tokens) - num_new  # tokens before this step's
        kept = verdict.accepted[:num_new]
        slots = self.pool.tables[request.id].slots
        moves = self.pool.moves(slots, base, kept)
        request.computed = base + len(kept) - (len(kept) == num_new)
        self.pool.trim(request.id, len(request.tokens))
        return moves

    def _emit(
        self, request: Request, draft: Tree, verdict: Verdict, name: str, logits: torch.Tensor, root: int
    ) -> Chunk:
        """Append the verdict's tokens up to the first that ends the text."""
        new = verdict.tokens(draft)
        first = not request.num_output
        kept = 0
        for token in new:
            kept += 1
            request.tokens.append(token)
            if self._ends(request, token):
                break
        new = new[:kept]
        request.stats.tokens += kept
        request.stats.record(name, len(draft), min(kept, len(verdict.accepted)))
        if first:
            request.stats.time_to_first_token = time.perf_counter() - request.arrived
            request.stats.first_tokens = kept
        if request.params.logprobs is not None:
            at = [root, *(root + 1 + n for n in verdict.accepted)][:kept]
            request.logprobs += sampling.logprobs(logits[at], new, request.params.logprobs)
        drafted = [i < len(verdict.accepted) for i in range(kept)]
        text = self._new_text(request)
        return Chunk(text, new, drafted, 0, request.finish_reason, request.stop_reason, request.stats.copy())

    def _ends(self, request: Request, token: int) -> bool:
        """Does this token end the text? Says why on the request."""
        p, stream = request.params, self._texts.get(request.id)
        is_stop = token in request.stop_ids
        visible = not is_stop or not p.skip_special_tokens or token in p.stop_token_ids
        if stream is not None and visible and stream.push(token, request.num_output >= p.min_tokens):
            request.finish_reason, request.stop_reason = "stop", stream.stopped_by
        elif is_stop:
            request.finish_reason = "stop"
            request.stop_reason = token if token in p.stop_token_ids else None
        elif request.num_output >= p.max_tokens or len(request.tokens) >= self.max_len:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _new_text(self, request: Request) -> str:
        stream = self._texts.get(request.id)
        if stream is None:
            return ""
        if request.finish_reason is not None:
            stream.finish()
        return stream.take()

    def _prompt_logprobs(self, part: Planned, logits: torch.Tensor) -> None:
        """Row j tells log p of the prompt token behind it; the first token has none."""
        r = part.request
        r.prompt_logprobs = r.prompt_logprobs[: r.computed + 1] or [None]  # a resumed request tells them once
        following = r.prompt[r.computed + 1 : r.computed + part.piece + 1]
        r.prompt_logprobs += sampling.logprobs(logits[: len(following)], following, r.params.prompt_logprobs or 0)

    def _leave(self, request: Request) -> None:
        """A request is over: free everything that is kept for it."""
        self.scheduler.finish(request)
        now = time.perf_counter()
        request.stats.time_total = now - request.arrived if request.arrived else 0.0
        self._texts.pop(request.id, None)
        self.drafting.release(request)

    def _account(self, plan: Plan, verdicts: list[Verdict], clock: Clock, num_tokens: int) -> None:
        laps = clock.laps
        for part in plan.parts:
            stats = part.request.stats
            stats.time_draft += laps["draft"]
            stats.time_target += laps["target"]
            stats.time_verify += laps["verify"]
            stats.time_host += laps["host"]
            stats.time_queue = stats.time_queue or clock.began - part.request.arrived
        times = StepTimes(laps["draft"], laps["target"], laps["verify"], laps["host"], num_tokens)
        self.policy.learn(times, [p.request for p in plan.ready], verdicts)

    def check_integrity(self) -> None:
        """Slots, tables and requests agree."""
        self.pool.check_integrity()
        held = set(self.pool.tables)
        assert held <= {r.id for r in self.scheduler.running}, "a table without a running request"
        for r in self.scheduler.running:
            assert r.computed < len(r.tokens) and len(self.pool.tables[r.id].slots) >= r.computed


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
