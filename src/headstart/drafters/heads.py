"""A head drafts from what the target computed: EAGLE, P-EAGLE, Medusa, MLP speculators, MTP; chains, or trees grown by path
probability.

For every token that the target computes, the engine hands over its features (`read`). What an EAGLE head remembers of a token
is one more layer of KV in the target's own slots: so it is paged, shared with equal prefixes, given up and computed anew with
the target's, and nobody keeps books twice. A shared page ends with an entry that looks one token ahead, at the text that
was there first: drafts may be a little worse for it, the text is not.

Entries of drafted nodes are guesses, and so are those of the blanks that a head reads which drafts all levels at once. They lie
in slots of the head's own, behind the target's, and are forgotten with the proposal.

Where the target keeps its texts on the device, drafts are made there too (`models.heads.grower`): features are read
from where the last forward left them, and nobody waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from headstart.config import SpeculativeConfig
from headstart.core import (
    NOTHING,
    PENDING,
    Batch,
    DeviceTexts,
    Draft,
    Mail,
    Reading,
    Request,
    RequestView,
    Segment,
    Tree,
    View,
)
from headstart.drafters import Needs, Surroundings
from headstart.drafters.growing import GrowingDrafter, Growth, frontier_shape, unpack
from headstart.errors import ConfigError
from headstart.models.attention import Attends, Context
from headstart.models.heads import Head
from headstart.models.packing import double_up
from headstart.sampling import Row, argmax, is_sure, top_scores
from headstart.shapes import USUAL_SIZES, depth_of, within

if TYPE_CHECKING:
    from headstart.models.heads.grower import Grower, PromptReader
    from headstart.models.kernels.growth import Growth as DeviceGrowth

SOME = 8  # rows from which on entries alone are worth a forward of their own
TOP_K, WIDTH = 8, 8  # of trees that nobody has described
EAGER = 64  # features of so many tokens are read at once; fewer wait until a draft is asked for


@dataclass(slots=True)
class Trail:
    """How far the head has read one text. Tokens [0, read) have entries in its KV, but for those that it missed; `features`
    are of those that follow."""

    read: int = 0
    missed: range = range(0)
    features: list[torch.Tensor] = field(default_factory=list)
    state: torch.Tensor | None = None  # (1, S) behind the last one read

    @property
    def waiting(self) -> int:
        return sum([len(f) for f in self.features])

    @property
    def known(self) -> int:
        return self.read + self.waiting

    def turn_to(self, start: int, unread: int | None = None) -> None:
        """The next features are of this token: it was computed anew, or is shared with others that were read; perhaps not from
        some token on."""
        if start != self.known:
            self.missed = range(start if unread is None else min(unread, start), start)
            self.reached(start)

    def skip_to(self, start: int) -> None:
        """It did not read what stands before this token, from where it was on."""
        self.missed = range(self.missed.start if self.missed else min(self.read, start), start)
        self.reached(start)

    def seen(self, slots: np.ndarray, end: int) -> np.ndarray:
        """The slots of the tokens before `end` that it has read."""
        return (
            np.concatenate([slots[: self.missed.start], slots[self.missed.stop : end]]) if self.missed else slots[:end]
        )

    def reached(self, known: int) -> None:
        """All before this token was read, or need not be: nothing waits."""
        self.read, self.features, self.state = known, [], None


@dataclass(frozen=True)
class Question:
    """What the device was asked: for which requests of the view, and how many nodes each of them all may have (-1: none was
    asked for)."""

    view: View
    drafted: list[RequestView]
    grower: Grower
    numbers: torch.Tensor  # their lines and seats, and what the head has missed, on the device
    sizes: tuple[int, ...]


class HeadDrafter(GrowingDrafter):
    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        super().__init__(config, around)
        self.head = self._given()
        most, depth = self.head.spec.max_depth, depth_of(config.static_tree or ((0,),))
        if most is not None and depth > most:
            raise ConfigError(
                f"static_tree is {depth} levels deep, and this {config.method} head drafts {most} tokens: "
                f"use a shallower one (headstart tree -k {most})."
            )
        self.needs = Needs(hidden_layers=self.head.spec.taps)
        self.targets = self.head.targets
        self.keeps = bool(self.head.shapes)  # something of each token: it has KV of its own
        self.device = next(itertools.chain(self.head.parameters(), self.head.buffers())).device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.num_slots = 0  # of the target; the head's own lie behind
        self.growths = self._growths() if around.takes_mail else []
        self.ahead = self.repeats = bool(self.growths)
        self._asked: Question | None = None  # the last one
        self.growers: list[Grower] = []  # of these shapes, the smallest first
        self._trails: dict[str, Trail] = {}
        self._states: dict[str, torch.Tensor] = {}  # of a proposal: the root's, then those of what is expanded
        self._levels: dict[str, torch.Tensor] = {}  # of a proposal: logits of the first level, then those of its blanks

    def _given(self) -> Head:
        head = self.around.extras.get("head")
        if head is None:
            name = self.config.method
            raise ConfigError(f"method {name!r} needs its checkpoint: {{'method': {name!r}, 'model': 'path or name'}}.")
        return head

    def allocate(self, num_slots: int) -> None:
        """Make the head's KV: a slot for each of the target's, and room for the nodes of every request."""
        slots = num_slots + self.around.max_num_seqs * self._most_nodes()
        self.num_slots = num_slots
        with torch.inference_mode():
            self.growers = []
            for growth in self.growths:
                self.growers.append(self._make_grower(growth, num_slots))
            slots = max([slots, *(g.slots for g in self.growers)])
            for pool, dim in ((self.keys, "key_dim"), (self.values, "value_dim")):
                pool[:] = [
                    torch.zeros(slots, s.kv_heads, getattr(s, dim), dtype=s.dtype, device=self.device)
                    for s in self.head.shapes
                ]
            for grower in self.growers:
                grower.write_to(self.keys, self.values)

    def _most_nodes(self) -> int:
        return self._room(self.config.num_speculative_tokens, self.config.nodes)

    # -------------------------------------------------------------- the contract
    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: Mapping[int, torch.Tensor] | None) -> None:
        """Take the features of what the target computed. Long pieces are read now, the others when a draft is asked for."""
        if hidden is None:
            for r in readings:
                self._trail(r.id).reached(r.start + len(r.rows))
            return
        if self.reads_ahead:
            over = {r.id for r in readings if r.ends and not self._waits(r.id)}
            self._write_down([r for r in readings if r.id in over], hidden)  # nobody goes on, but others may share it
            readings = [r for r in readings if r.id not in over]
        if not readings:
            return
        if not self.keeps:  # nothing is remembered: the last token is all that matters
            readings = [r.last() for r in readings]
        rows = torch.tensor([row for r in readings for row in r.rows], device=self.device)
        features = torch.cat([hidden[layer].index_select(0, rows) for layer in self.head.spec.taps], -1)
        for r, own in zip(readings, features.split([len(r.rows) for r in readings]), strict=True):
            trail = self._trail(r.id)
            trail.turn_to(r.start, r.unread)
            if not self.keeps:
                trail.reached(r.start)
            trail.features.append(own)
        most = 1 if self.growers else EAGER  # the device reads on from the last known token
        long = [r for r in readings if r.ends or r.known > most or self._trails[r.id].waiting >= EAGER]
        if self.head.remembers:
            return self._remember([(r.id, r.tokens, r.slots) for r in long], {r.id for r in long if r.ends})
        self._catch_up([(r.id, r.tokens, r.slots) for r in long])

    def _trail(self, request: str) -> Trail:
        """A new one, where it has read nothing of this request."""
        if request not in self._trails:
            self._trails[request] = Trail()
        return self._trails[request]

    def _waits(self, request: str) -> bool:
        return request in self._trails and self._trails[request].waiting > 0

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        return bool(self.growers) and self.growers[0].remembers

    @property
    def reader(self) -> PromptReader | None:  # type: ignore[override]
        return self.growers[0].reader if self.reads_ahead and self.keeps else None

    def read_ahead(self, readings: Sequence[Reading]) -> None:
        """Entries of prompts alone: the state behind the last known token is found when a draft is asked for."""
        for r in readings:
            trail = self._trail(r.id)
            trail.turn_to(r.start, r.unread)
            trail.reached(r.start + len(r.rows))

    def _write_down(self, readings: Sequence[Reading], hidden: Mapping[int, torch.Tensor]) -> None:
        """Make the entries of these rows where the target left them."""
        if not self.keeps or not any(r.rows for r in readings):
            return
        numbers = np.empty((4, sum(len(r.rows) for r in readings)), np.int64)
        at = 0
        for r in readings:
            end = r.start + len(r.rows)
            own = numbers[:, at : at + len(r.rows)]
            own[0], own[1], own[2] = r.rows, r.tokens[r.start + 1 : end + 1], np.arange(r.start, end)
            own[3] = r.slots[r.start : end]
            at += len(r.rows)
        self.growers[0].remember(hidden, numbers)

    @torch.inference_mode()
    def propose(self, view: View) -> Draft:
        if view.texts is not None:
            return self._on_device(view, view.texts)
        growths = [g for r in view.requests if (g := self._begin(r)) is not None]
        blanks = {g.view.id: self._own_slots(i, g.depth - 1) for i, g in enumerate(growths) if self.head.blank}
        if self.head.remembers:
            own = [(g.view.id, g.view.tokens, g.view.slots) for g in growths]
            self._remember([t for t in own if self._trails[t[0]].waiting > SOME])
        ahead = self._catch_up([(g.view.id, g.view.tokens, g.view.slots) for g in growths], blanks)
        logq: list[torch.Tensor] = []
        if growths:
            self._states = {g.view.id: self._trails[g.view.id].state for g in growths}  # type: ignore[misc]
            states = [torch.cat([root, ahead.get(id, root[:0])]) for id, root in self._states.items()]
            levels = self.head.logits(0, torch.cat(states)).split([len(s) for s in states])
            self._levels = dict(zip(self._states, levels, strict=True))
            for g in growths:
                g.logits = self._levels[g.view.id][:1]
            self._grow_levels(growths, logq)
        done = {g.view.id: self._chosen_tree(g) for g in growths}
        return Draft.of([done.get(r.id, Tree()) for r in view.requests], torch.cat(logq) if logq else None)

    def rest(self, request: str) -> int:
        trail = self._trails.get(request, Trail())
        return trail.missed.start if trail.missed else trail.read

    def join(self, request: str, position: int) -> None:
        self._trail(request).skip_to(position)

    def release(self, request: RequestView) -> None:
        self._trails.pop(request.id, None)

    def close(self) -> None:
        self.keys, self.values, self.growers, self._asked = [], [], [], None

    def describe(self) -> str:
        return f"{self.head.spec.kind} head, {self._drafts()}"

    # -------------------------------------------------------------- on the device
    def _growths(self) -> list[DeviceGrowth]:
        """The shapes of drafts that are made there, the smallest first; none where they are not."""
        from headstart.models.heads.grower import fits
        from headstart.models.kernels.growth import Growth as DeviceGrowth

        c, most = self.config, self.head.spec.max_depth
        if c.static_tree is not None:
            return []
        deepest = c.num_speculative_tokens if most is None else min(most, c.num_speculative_tokens)
        sizes = [(c.nodes if c.tree else deepest, deepest)]
        if c.policy == "adaptive":
            sizes = within(USUAL_SIZES, deepest, c.nodes)
        reads = max((depth for _, depth in sizes), default=0)
        out = []
        for nodes, depth in sizes:
            top_k, width, split = (self.top_k, self.width, c.p_split) if c.tree else (1, 1, 0.0)
            if nodes > depth and not c.tree:
                top_k, width, split = TOP_K, WIDTH, 0.0
            out.append(DeviceGrowth(depth, top_k, width, nodes, c.p_min, split, reads))
        return [g for g in out if g.depth >= max(1, c.min_draft_tokens) and fits(self.head, g)]

    def _grower(self, requests: Sequence[RequestView]) -> Grower:
        """The smallest that drafts what these may have."""
        nodes, depth = max([r.budget for r in requests]), max([r.max_depth for r in requests])
        enough = [g for g in self.growers if g.growth.nodes >= nodes and g.growth.depth >= min(depth, nodes)]
        return (enough or self.growers[-1:])[0]

    def _make_grower(self, growth: DeviceGrowth, num_slots: int) -> Grower:
        from headstart.models.heads.grower import Grower
        from headstart.models.kernel_runner import device_limits

        a, other = self.around, self.growers[0] if self.growers else None
        return Grower(
            self.head, growth, a.max_num_seqs, a.max_model_len, a.page_size, num_slots, device_limits(self.device), other,
        )  # fmt: skip

    def _on_device(self, view: View, texts: DeviceTexts) -> Draft:
        """Drafts by mail, for the requests that the last forward left features of."""
        able = [self._can_grow(r) for r in view.requests]
        drafted = [r for r, can in zip(view.requests, able, strict=True) if can]
        if not drafted or view.step is None or not self.growers:
            return Draft.of([Tree() for _ in view.requests])
        self._catch_up([(r.id, r.tokens, r.slots) for r in drafted if self._has_more(r)])
        grower, count, padded = self._grower(drafted), len(drafted), double_up(len(drafted))
        trails = [self._trails[r.id] for r in drafted]
        columns = (
            [r.line for r in drafted], [r.seat for r in drafted],
            [t.missed.start for t in trails], [t.missed.stop for t in trails],
        )  # fmt: skip
        numbers = texts.on_device([n for column in columns for n in column + column[-1:] * (padded - count)])
        for trail in trails:
            trail.reached(trail.known)
        most = grower.growth.nodes
        sizes = tuple([min(r.budget, most) if can else -1 for r, can in zip(view.requests, able, strict=True)])
        self._asked = Question(view, drafted, grower, numbers, sizes)
        return self._grow(self._asked, grower)

    @torch.inference_mode()
    def again(self, view: View) -> Draft:
        asked = self._asked
        return self._grow(asked, asked.grower.own) if asked is not None and asked.view is view else self.propose(view)

    def _grow(self, asked: Question, grower: Grower) -> Draft:
        view = asked.view
        assert view.step is not None and view.texts is not None
        found = grower.grow(view.step, view.texts, asked.numbers, len(asked.drafted))
        return self._send(asked.sizes, found, view.texts.read(found), grower.growth)

    def _can_grow(self, r: RequestView) -> bool:
        """Does the device know how far the head has read this text, and is there room for a whole draft?"""
        trail = self._trails.get(r.id)
        if trail is None or not self.growths or r.line < 0 or (not r.budget and r.tokens[-1] != PENDING):
            return False
        told = r.tokens[-1] == PENDING or trail.known == len(r.tokens) - 1
        return told and len(r.tokens) + 2 * self.growths[-1].depth < self.around.max_model_len

    def _has_more(self, r: RequestView) -> bool:
        """Do features wait that the last forward did not leave? The device reads no others."""
        waiting = len(self._trails[r.id].features)
        return waiting > 1 or (waiting == 1 and r.tokens[-1] == PENDING)

    @staticmethod
    def _send(sizes: tuple[int, ...], found: torch.Tensor, told: Callable[[], np.ndarray], g: DeviceGrowth) -> Draft:
        """The host knows no more than how many nodes there may be: their tokens and parents are in the mail."""
        at, index, offsets = _places(sizes, g)
        branches = g.nodes > 1 and (g.width > 1 or g.top_k > 1)
        unknown, parents = [PENDING] * g.nodes, [-1] * g.nodes if branches else list(range(-1, g.nodes - 1))
        trees = [Tree(unknown[:n], parents[:n]) if n > 0 else Tree() for n in sizes]
        draft = Draft(NOTHING, NOTHING, offsets, grown=trees)

        def wait() -> list[Tree]:
            rows = iter(told().tolist())
            return [_tree(next(rows), g.nodes) if n >= 0 else Tree() for n in sizes]

        draft.mail = Mail(found.view(-1), index, wait, at, at + 1 + g.nodes if branches else None, g.depth)
        return draft

    # -------------------------------------------------------------- catch up
    def _begin(self, r: RequestView) -> Growth | None:
        """None where this request gets no draft: no budget, or the target's features are not there."""
        most = self.head.spec.max_depth
        depth = min(self.config.num_speculative_tokens, r.max_depth, r.budget, r.max_depth if most is None else most)
        trail = self._trails.get(r.id)
        if depth < 1 or r.request is None or trail is None or trail.known != len(r.tokens) - 1:
            return None
        if len(r.slots) < trail.known:  # it was set aside, and is computed anew in this step
            return None
        rule, samples = self._rule(r, r.request)
        plan = self._plan(depth, r.budget, samples)
        return Growth(r, list(r.tokens), rule, depth, len(r.tokens), samples, plan=plan, frontier=[-1])

    def _catch_up(
        self, texts: list[tuple[str, Sequence[int], np.ndarray]], blanks: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, torch.Tensor]:
        """Read the features that wait, and blanks behind them into these slots, for these requests, in one forward.
        Returns the states of the blanks."""
        blanks, blank = blanks or {}, self.head.blank
        ahead: dict[str, torch.Tensor] = {}
        waiting = [t for t in texts if self._trails[t[0]].features or len(blanks.get(t[0], ()))]
        if not waiting:
            return ahead
        features: list[torch.Tensor] = []
        following: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for id, tokens, slots in waiting:
            trail, own, start = self._trails[id], blanks.get(id, NOTHING), len(following)
            features += trail.features
            following += tokens[trail.read + 1 : trail.known + 1]
            if blank is not None:
                features.append(blank.features.expand(len(own), -1))
                following += [blank.token] * len(own)
            positions += range(trail.read, trail.known + len(own))
            room = np.concatenate([trail.seen(slots, trail.known), own])
            segments.append(Segment(start, len(following), trail.read - len(trail.missed), room))
        paged = not any(self._trails[id].missed for id, _, _ in waiting)
        state = self._advance(0, self.head.begin(torch.cat(features)), following, positions, segments, paged)
        for (id, _, _), segment in zip(waiting, segments, strict=True):
            trail, end = self._trails[id], segment.stop - len(blanks.get(id, ()))
            ahead[id] = state[end : segment.stop]
            if trail.features:
                trail.read, trail.features = trail.known, []
                trail.state = state[end - 1 : end].clone()
        return ahead

    def _remember(self, texts: list[tuple[str, Sequence[int], np.ndarray]], over: Set[str] = frozenset()) -> None:
        """Read the features that wait, but for the last of each text that is not over: its state will be asked for."""
        features: list[torch.Tensor] = []
        following: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for id, tokens, slots in texts:
            trail, start = self._trails[id], len(following)
            own = torch.cat(trail.features)
            end = trail.known - (id not in over)
            features.append(own[: end - trail.read])
            following += tokens[trail.read + 1 : end + 1]
            positions += range(trail.read, end)
            segments.append(Segment(start, len(following), trail.read - len(trail.missed), trail.seen(slots, end)))
            trail.features, trail.read, trail.state = [own[end - trail.read :]] if id not in over else [], end, None
        if following:
            batch = Batch(np.array(following), np.array(positions), segments, np.empty(0, np.int64))
            token, position = (torch.tensor(x, device=self.device) for x in (following, positions))
            context = Context(batch, self.keys, self.values, self.device)
            self.head.remember(self.head.begin(torch.cat(features)), token, position, context)

    def _advance(
        self,
        level: int,
        state: torch.Tensor,
        tokens: list[int],
        positions: list[int],
        segments: list[Segment],
        paged: bool = False,
    ) -> torch.Tensor:
        """`paged`: the slots of each segment are whole pages, one behind the other."""
        token, position = (torch.tensor(x, device=self.device) for x in (tokens, positions))
        if not self.keeps:
            return self.head.advance(level, state, token, position, None)
        batch = Batch(np.array(tokens), np.array(positions), segments, np.empty(0, np.int64))
        context: Attends
        if self.growers and paged:
            context = self.growers[0].context(batch)
        else:
            context = Context(batch, self.keys, self.values, self.device)
        return self.head.advance(level, state, token, position, context)

    # -------------------------------------------------------------- grow
    def _expand(self, growths: list[Growth], level: int) -> None:
        """One forward over the frontier nodes of all requests; each goes on from the state of its parent. A head that drafts in
        parallel has said what it says of this level, whatever stands before."""
        if self.head.blank is not None:
            for g in growths:
                g.expanded += g.frontier
                g.logits = self._levels[g.view.id][level].expand(len(g.frontier), -1)
            return
        states: list[torch.Tensor] = []
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for g in growths:
            start, base = len(tokens), len(g.context) - 1
            place = {-1: 0} | {n: k + 1 for k, n in enumerate(g.expanded)}
            states.append(self._states[g.view.id][[place[g.tree.parents[n]] for n in g.frontier]])
            depth, parents = frontier_shape(g)
            tokens += [g.tree.tokens[n] for n in g.frontier]
            positions += [base + d - 1 for d in depth]
            own = self._own_slots(list(self._states).index(g.view.id), len(g.expanded))
            trail = self._trails[g.view.id]
            slots, context = np.concatenate([trail.seen(g.view.slots, base), own]), base - len(trail.missed)
            segments.append(Segment(start, len(tokens), context, slots, np.array(parents, dtype=np.int64)))
        state = self._advance(level, torch.cat(states), tokens, positions, segments)
        for g, segment in zip(growths, segments, strict=True):
            self._states[g.view.id] = torch.cat([self._states[g.view.id], state[segment.start : segment.stop]])
        unpack(growths, self.head.logits(level, state))

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The likeliest token of each row: all that a greedy chain needs to know, unless a policy asks how sure it is."""
        best = torch.tensor(argmax(logits), device=logits.device)[:, None]
        sure = torch.ones(len(best), 1)
        if self.config.policy != "fixed":
            sure = (logits.gather(1, best).float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        return best if self.targets is None else self.targets[best], sure, None

    def _own_slots(self, index: int, count: int) -> np.ndarray:
        """Of the request with this number in the proposal."""
        first = self.num_slots + index * self._most_nodes()
        return np.arange(first, first + count)

    def _rank(
        self, logits: torch.Tensor, rows: list[Row], samples: bool, level: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Within the head's own vocabulary where nothing but temperature and noise decides."""
        if self.shape[0] == 1 and self.config.p_min <= 0 and all(_is_plain(r.request) for r in rows):
            return self._best(logits)
        if self.targets is None:
            return top_scores(logits.float(), rows, self.shape[0])
        if samples or not all(is_sure(r.request) for r in rows):
            whole = torch.full((len(logits), self.around.vocab_size), -torch.inf, device=logits.device)
            return top_scores(whole.index_copy_(1, self.targets, logits.float()), rows, self.shape[0])
        return top_scores(logits.float(), rows, self.shape[0], self.targets)


@functools.lru_cache(256)
def _places(sizes: tuple[int, ...], g: DeviceGrowth) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the mail of each request begins, where the tokens of its first nodes are, and where its nodes begin among all;
    -1: it has no mail."""
    at = np.cumsum([0, *(n >= 0 for n in sizes)])[:-1] * g.mail
    index = np.concatenate([a + 1 + np.arange(max(n, 0)) for a, n in zip(at, sizes, strict=True)])
    return at, index, np.cumsum([0, *(max(n, 0) for n in sizes)])


def _tree(numbers: list[int], nodes: int) -> Tree:
    """How many, tokens, parents."""
    count = numbers[0]
    return Tree(numbers[1 : 1 + count], numbers[1 + nodes : 1 + nodes + count])


def _is_plain(request: Request) -> bool:
    return request.params.greedy and is_sure(request)
