"""A small model drafts for a large one: its own KV pool, chains or trees, any vocabulary.

A proposal has two parts. *Catch up*: the draft model computes what the target has committed since it last looked; KV
is reused as far as tokens agree. *Grow*: level by level, one forward for the frontier of all requests together
(`growing`).

Where the runner chooses tokens itself and the draft is a chain, no forward waits for the one before: each takes its token on
the device, and the host waits once, at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headstart.config import SpeculativeConfig
from headstart.core import (
    PENDING,
    Batch,
    Choice,
    Draft,
    Landing,
    Mail,
    Request,
    RequestView,
    SamplingParams,
    Segment,
    Tree,
    Verdict,
    View,
)
from headstart.drafters import Needs, Surroundings
from headstart.drafters.growing import GrowingDrafter, Growth, frontier_shape, unpack
from headstart.errors import ConfigError
from headstart.kv import KVPool
from headstart.models import vocab
from headstart.models.load import Loaded
from headstart.models.runners import make_runner
from headstart.progress import note
from headstart.sampling import Row, ask, can_ask

MAX_BATCH_TOKENS = 512
MOST_QUEUED = 48  # forwards of one chain that may be on their way at once
TAIL = 8  # target tokens re-read when a text draft is put into the target's tokens


@dataclass
class Piece:
    """Tokens of one request in one forward of a chain: known ones, or one that row `source` of the last forward chose."""

    growth: Growth
    tokens: list[int]
    at: int  # position of the first
    asks: bool = True  # the last row chooses
    source: int = -1


@dataclass
class Memory:
    """What lies in the draft's KV for one request."""

    tokens: list[int] = field(default_factory=list)
    growth: Growth | None = None  # of the last proposal


class ModelDrafter(GrowingDrafter):
    needs = Needs(own_kv=True)

    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        super().__init__(config, around)
        loaded = self._load()
        self.runner = make_runner(loaded.model, around.fuse, kernels=around.kernels)
        self.runner.lenient = True
        self.tokenizer, self.max_len = loaded.tokenizer, loaded.max_len
        self.map = self._map(loaded)
        if self.map.kind == vocab.STRING and config.tree:
            raise ConfigError("tree drafts need a draft model whose tokens can be mapped one by one: leave trees out.")
        self.pool = KVPool(self._num_pages(), around.page_size, True, self.runner.freed, self.runner.max_texts)
        self._memory: dict[str, Memory] = {}
        rows = max(MAX_BATCH_TOKENS, around.max_num_seqs * self.width)
        self.runner.allocate(self.pool.num_slots, around.page_size, rows, around.max_num_seqs)
        self.straight = (
            self.runner.chooses
            and not config.tree
            and config.p_min <= 0
            and config.num_speculative_tokens <= MOST_QUEUED
            and self.map.kind == vocab.SAME
            and self.runner.vocab_size <= around.vocab_size
        )

    def _load(self) -> Loaded:
        if (given := self.around.extras.get("draft_model")) is not None:
            return given
        raise ConfigError("method 'draft_model' needs a model: {'method': 'draft_model', 'model': 'path or name'}.")

    def _map(self, loaded: Loaded) -> vocab.VocabMap:
        if self.around.tokenizer is None:
            return vocab.VocabMap(vocab.SAME, 1.0, self.around.vocab_size)
        size = self.around.vocab_size
        found = vocab.map_vocab(
            self.around.tokenizer, loaded.tokenizer, size, loaded.vocab_size, self.config.vocab_mapping
        )
        if found.kind != vocab.SAME:
            note(f"draft model {loaded.name}: {found.describe()}")
        return found

    def _num_pages(self) -> int:
        """Room for every running request at the length that the target may use, within the memory given."""
        a = self.around
        wanted = a.max_num_seqs * (min(a.max_model_len, self.max_len) + self.config.nodes)
        memory = a.kv_memory or (1 << 30)
        return max(2, min(wanted, memory // self.runner.slot_bytes) // a.page_size)

    # -------------------------------------------------------------- the contract
    @torch.inference_mode()
    def propose(self, view: View) -> Draft:
        try:
            growths = [g for r in view.requests if (g := self._begin(r)) is not None]
            return self._grow(view, growths)
        except Exception:
            for r in view.requests:  # pages that were promised may not hold what they say
                self.pool.forget(r.id, 0)
                self.release(r)
            raise

    def _grow(self, view: View, growths: list[Growth]) -> Draft:
        logq: list[torch.Tensor] = []
        self.shape = self._shape(growths)
        for g in growths:
            self._memory[g.view.id].growth = g
        if self.straight and growths and all(not g.samples and can_ask(g.rule) for g in growths):
            return self._run_chains(view, growths)
        self._catch_up(growths)
        self._grow_levels(growths, logq)
        done = {g.view.id: self._finish(g) for g in growths}
        trees = [done.get(r.id, Tree()) for r in view.requests]
        return Draft.of(trees, torch.cat(logq) if logq else None)

    def _shape(self, growths: list[Growth]) -> tuple[int, int]:
        """Candidates of a node and branches of a level; chains where the runner cannot hold the paths of so many trees."""
        most = self.runner.most_paths
        paths = sum(g.plan.num_paths if g.plan else 1 + (g.depth - 1) * (self.width - 1) for g in growths)
        if most is None or paths <= most:
            return self.top_k, self.width
        for g in growths:
            g.plan = None
        return 1, 1

    def observe(self, view: View, trees: list[Tree], verdicts: list[Verdict]) -> None:
        """Keep the KV of the nodes that the target took over too."""
        sources, targets, grew = [], [], []
        for r in view.requests:
            memory = self._memory.get(r.id)
            if memory is None or memory.growth is None:
                continue
            growth, memory.growth = memory.growth, None
            taken = self._taken(growth, r)
            kept = [growth.expanded.index(n) for n in taken]
            slots = self.pool.slots(r.id, len(growth.context) + len(growth.expanded))
            source, target = self.pool.moves(slots, len(growth.context), kept)
            sources.append(source)
            targets.append(target)
            memory.tokens = growth.context + [growth.draft_tokens[n] for n in taken]
            grew.append((slots, len(memory.tokens)))
        if sources:
            self.runner.move(np.concatenate(sources), np.concatenate(targets))
        for slots, length in grew:
            self.runner.keep(slots, length)

    def release(self, request: RequestView) -> None:
        if self._memory.pop(request.id, None) is not None:
            self.pool.close(request.id)

    def close(self) -> None:
        self.runner.release()

    def forget(self) -> None:
        self.pool.forget_finished()

    def describe(self) -> str:
        return f"draft model, {self._drafts()}, {self.map.describe()}"

    # -------------------------------------------------------------- catch up
    def _begin(self, r: RequestView) -> Growth | None:
        """None where this request gets no draft: no budget, too long for the draft model, or no room in its KV."""
        context = self._context(r)
        depth = min(self.config.num_speculative_tokens, r.max_depth, self.max_len - len(context))
        if self.map.kind != vocab.STRING:
            depth = min(depth, r.budget)
        if depth < 1 or r.budget < 1 or not context or r.request is None:
            return None
        memory = self._memory.setdefault(r.id, Memory())
        same = _common(memory.tokens, context)
        if same < len(memory.tokens):  # the text was spelled anew: a page that others may find is never rewritten
            same -= same % self.pool.page_size
            self.pool.trim(r.id, same)
        computed = min(same, len(context) - 1)
        computed = self.pool.attach(r.id, context, computed, len(context) - 1)
        if not self.pool.reserve(r.id, len(context) + self._room(depth, r.budget)):
            self.pool.close(r.id)
            del self._memory[r.id]
            return None
        memory.tokens = context
        self.pool.seal(r.id, context, len(context))
        rule, samples = self._rule(r, r.request)
        plan = self._plan(depth, r.budget, samples)
        return Growth(r, context, rule, depth, len(r.tokens), samples, computed, plan, frontier=[-1])

    def _context(self, r: RequestView) -> list[int]:
        if self.map.kind == vocab.SAME:
            return list(r.tokens)
        if self.map.kind == vocab.STRING:
            return self.tokenizer.encode(self.around.tokenizer.decode(r.tokens, skip_special=False), special=False)
        out: list[int] = []
        for t in r.tokens:
            mapped = self.map.to_draft.get(t)
            if mapped is not None:
                out.append(mapped)
            else:
                out += self.tokenizer.encode(self.around.tokenizer.decode([t], skip_special=False), special=False)
        return out

    def _catch_up(self, growths: list[Growth]) -> None:
        """Compute what the draft model has not seen; the last forward of each request gives its first logits."""
        for batch in _reads(growths):
            self._read(batch)
            if any(g.computed < len(g.context) for g in growths):  # logits last until the next forward
                for g, _ in batch:
                    g.logits = None if g.logits is None else g.logits.clone()

    def _read(self, pieces: list[tuple[Growth, int]]) -> None:
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        ends: list[Growth] = []
        for g, n in pieces:
            start = len(tokens)
            tokens += g.context[g.computed : g.computed + n]
            positions += range(g.computed, g.computed + n)
            slots = self.pool.slots(g.view.id, g.computed + n)
            segments.append(Segment(start, start + n, g.computed, slots))
            g.computed += n
            if g.computed == len(g.context):
                rows.append(start + n - 1)
                ends.append(g)
        logits = self._forward(tokens, positions, segments, rows)
        for i, g in enumerate(ends):
            g.logits = logits[i : i + 1]

    def _forward(self, tokens: list[int], positions: Any, segments: list[Segment], rows: list[int]) -> torch.Tensor:
        """Logits (R, V) over the target's vocabulary (over the draft's own where drafts pass through text)."""
        batch = Batch(
            np.array(tokens, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            segments,
            np.array(rows, dtype=np.int64),
        )
        logits = self.runner.forward(batch).logits.float()
        return logits if self.map.kind == vocab.STRING else self.map.lift(logits)

    # -------------------------------------------------------------- chains that the runner draws
    def _run_chains(self, view: View, growths: list[Growth]) -> Draft:
        """Queue every forward of every chain. Nobody waits here where the target takes its mail on the device."""
        queued: list[tuple[list[Piece], Landing]] = []
        for batch in _reads(growths):
            pieces = []
            for g, n in batch:
                pieces.append(Piece(g, g.context[g.computed : g.computed + n], g.computed))
                g.computed += n
                pieces[-1].asks = g.computed == len(g.context)
            queued.append((pieces, self._draw(pieces)))
            if len(queued) > 1:  # a long text is read in many forwards: do not queue them all
                queued[-2][1].verdicts()
        sources = _last_rows(queued[-1][0])
        first = {} if len(queued) == 1 else _chosen(queued)  # only the last forward's choices are still on the device
        mail = [] if first else [queued[-1][1].device[:, 1].clone()]
        for level in range(1, max(g.depth for g in growths)):
            pieces = []
            for g in growths:
                if level < g.depth:
                    known = first.get(id(g), [0])[:1] if level == 1 else [0]
                    source = -1 if level == 1 and first else sources[id(g)]
                    pieces.append(Piece(g, known, len(g.context) + level - 1, source=source))
            queued.append((pieces, self._draw(pieces)))
            sources = _last_rows(pieces)
            mail.append(queued[-1][1].device[:, 1].clone())
        if first or not self.around.takes_mail:
            self._open(growths, queued)
            done = {g.view.id: self._finish(g) for g in growths}
            return Draft.of([done.get(r.id, Tree()) for r in view.requests])
        return self._send(view, growths, queued, mail)

    def _open(self, growths: list[Growth], queued: list[tuple[list[Piece], Landing]]) -> dict[int, list[int]]:
        """Wait for what was chosen; a chain ends with a token that ends the text."""
        chosen = _chosen(queued)
        for g in growths:
            ends = next((i + 1 for i, t in enumerate(chosen[id(g)]) if t in g.rule.stop_ids), g.depth)
            g.draft_tokens = chosen[id(g)][:ends]
            g.tree, g.values = Tree.chain(g.draft_tokens), [1.0] * len(g.draft_tokens)
            g.expanded = list(range(min(g.depth - 1, len(g.tree))))
        return chosen

    def _send(
        self, view: View, growths: list[Growth], queued: list[tuple[list[Piece], Landing]], mail: list[torch.Tensor]
    ) -> Draft:
        """A draft whose tokens the target finds on the device; whoever needs them here waits for them then."""
        depth = {g.view.id: g.depth if g.depth >= self.config.min_draft_tokens else 0 for g in growths}
        place: dict[int, list[int]] = {id(g): [] for g in growths}
        start = 0
        for pieces, _ in queued:
            for i, p in enumerate(pieces):
                place[id(p.growth)].append(start + i)
            start += len(pieces)
        by_id = {g.view.id: g for g in growths}
        order = [place[id(by_id[r.id])][: depth[r.id]] if r.id in by_id else [] for r in view.requests]
        draft = Draft.of([Tree.chain([PENDING] * len(o)) for o in order])

        def wait() -> list[Tree]:
            chosen = self._open(growths, queued)
            drafted = [(by_id.get(r.id), len(o)) for r, o in zip(view.requests, order, strict=True)]
            return [Tree.chain(chosen[id(g)][:n] if g else ()) for g, n in drafted]

        draft.mail = Mail(torch.cat(mail), np.array([i for o in order for i in o], dtype=np.int64), wait)
        return draft

    def _draw(self, pieces: list[Piece]) -> Landing:
        """One forward in which the last row of each piece that asks chooses a token."""
        starts = list(itertools.accumulate((len(p.tokens) for p in pieces), initial=0))
        asking = [(p, stop - 1) for p, stop in zip(pieces, starts[1:], strict=True) if p.asks]
        choice = Choice.of(len(asking), len(pieces))
        choice.nodes[:] = [0 if p.asks else -1 for p in pieces]
        ask(choice, [(p.growth.rule, i, 1) for i, (p, _) in enumerate(asking)])
        segments = [
            Segment(start, start + len(p.tokens), p.at, self.pool.slots(p.growth.view.id, p.at + len(p.tokens)))
            for p, start in zip(pieces, starts, strict=False)
        ]
        batch = Batch(
            np.array([t for p in pieces for t in p.tokens], dtype=np.int64),
            np.array([p.at + i for p in pieces for i in range(len(p.tokens))], dtype=np.int64),
            segments,
            np.array([row for _, row in asking], dtype=np.int64),
            source=np.array([s for p in pieces for s in ([-1] * (len(p.tokens) - 1) + [p.source])], dtype=np.int64),
            choice=choice,
        )
        landing = self.runner.forward(batch).landing
        assert landing is not None
        return landing

    # -------------------------------------------------------------- grow
    def _rows(self, g: Growth) -> list[Row]:
        return super()._rows(g) if self.map.kind != vocab.STRING else [Row(PLAIN) for _ in g.frontier]

    def _ends(self, g: Growth) -> Set[int]:
        return self.tokenizer.eos_ids if self.map.kind == vocab.STRING else super()._ends(g)

    def _own(self, token: int) -> int:
        return token if self.map.kind != vocab.TOKEN else self.map.to_draft.get(token, 0)

    def _expand(self, growths: list[Growth], level: int) -> None:
        """One forward over the frontier nodes of all requests."""
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for g in growths:
            start, base = len(tokens), len(g.context)
            depth, parents = frontier_shape(g)
            tokens += [g.draft_tokens[n] for n in g.frontier]
            positions += [base + d - 1 for d in depth]
            slots = self.pool.slots(g.view.id, base + len(g.expanded))
            segments.append(Segment(start, len(tokens), base, slots, np.array(parents, dtype=np.int64)))
        unpack(growths, self._forward(tokens, positions, segments, list(range(len(tokens)))))

    def _finish(self, g: Growth) -> Tree:
        """The tree that goes to the target."""
        if self.map.kind != vocab.STRING:
            return self._chosen_tree(g)
        text = self.tokenizer.decode(g.draft_tokens, skip_special=True)
        return Tree.chain(vocab.align(self.around.tokenizer, g.view.tokens[-TAIL:], text)[: g.view.budget])

    def _taken(self, g: Growth, r: RequestView) -> list[int]:
        """Expanded nodes that agree with what the request's text became."""
        if self.map.kind == vocab.STRING:
            new = self._context(r)
            if new[: len(g.context)] != g.context:
                return []
            new, tokens = new[len(g.context) :], g.draft_tokens
        else:
            new, tokens = list(r.tokens[g.length :]), g.tree.tokens
        out: list[int] = []
        computed, parent = set(g.expanded), -1
        for token in new:
            match = next((n for n in computed if g.tree.parents[n] == parent and tokens[n] == token), None)
            if match is None:
                break
            out.append(match)
            parent = match
        return out


PLAIN = Request(
    [0], SamplingParams(temperature=0.0), seed=0
)  # a text draft is ranked by q alone: its tokens are not the target's


def _reads(growths: list[Growth]) -> Iterator[list[tuple[Growth, int]]]:
    """What the draft model has not seen yet, forward by forward: requests, and how many tokens of each."""
    while waiting := [g for g in growths if g.computed < len(g.context)]:
        batch: list[tuple[Growth, int]] = []
        room = MAX_BATCH_TOKENS
        for g in waiting:
            if take := min(len(g.context) - g.computed, room):
                batch.append((g, take))
                room -= take
        yield batch


def _last_rows(pieces: list[Piece]) -> dict[int, int]:
    """The row in which each request's piece ends."""
    ends = itertools.accumulate(len(p.tokens) for p in pieces)
    return {id(p.growth): end - 1 for p, end in zip(pieces, ends, strict=True)}


def _chosen(queued: list[tuple[list[Piece], Landing]]) -> dict[int, list[int]]:
    """Every request's tokens, in order; waits for the device."""
    out: dict[int, list[int]] = {}
    for pieces, landing in queued:
        for piece, verdict in zip(pieces, landing.verdicts(), strict=True):
            if verdict is not None:
                out.setdefault(id(piece.growth), []).append(verdict.bonus)
    return out


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
