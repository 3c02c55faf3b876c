"""The target's own first layers draft: no checkpoint, no training, no KV of its own.

A draft token is what the target's final norm and lm_head make of the stream behind its first `exit_layer` layers (LayerSkip,
arXiv 2404.16710). The text's keys and values of these layers are the target's own, and are read where they lie. The last token
and the nodes have none yet: theirs go to the slots that the step has reserved for them, and the target's forward writes them
anew, in all layers.
"""

from __future__ import annotations

import numpy as np
import torch

from headstart.config import SpeculativeConfig
from headstart.core import Batch, Draft, RequestView, Segment, Tree, View
from headstart.drafters import Needs, Surroundings
from headstart.drafters.growing import GrowingDrafter, Growth, frontier_shape, unpack
from headstart.errors import ConfigError
from headstart.models.base import Runner


class EarlyExitDrafter(GrowingDrafter):
    needs = Needs(target_kv=True)

    def __init__(self, config: SpeculativeConfig, around: Surroundings) -> None:
        super().__init__(config, around)
        self.runner = self._given()
        count = self.runner.num_layers
        self.layers = config.exit_layer or max(1, count // 3)
        if self.layers > count:
            raise ConfigError(f"exit_layer={self.layers} is not usable: the target has {count} layers.")

    def _given(self) -> Runner:
        runner = self.around.target
        if runner is None or not runner.num_layers:
            raise ConfigError(
                "'early_exit' runs the target's first layers alone, which this runner cannot: use runner='torch'."
            )
        return runner

    @torch.inference_mode()
    def propose(self, view: View) -> Draft:
        growths = [g for r in view.requests if (g := self._begin(r)) is not None]
        logq: list[torch.Tensor] = []
        if growths:
            self._expand(growths, 0)
            self._grow_levels(growths, logq)
        done = {g.view.id: self._chosen_tree(g) for g in growths}
        return Draft.of([done.get(r.id, Tree()) for r in view.requests], torch.cat(logq) if logq else None)

    def describe(self) -> str:
        return f"the first {self.layers} of {self.runner.num_layers} layers, {self._drafts()}"

    def _begin(self, r: RequestView) -> Growth | None:
        """None where this request gets no draft: no budget, or its text but for the last token is not in KV yet."""
        depth = min(self.config.num_speculative_tokens, r.max_depth, r.budget)
        known = (
            len(r.slots) == len(r.tokens) - 1 and len(r.tokens) > r.num_prompt
        )  # not what others compute in this step
        if depth < 1 or r.request is None or not known:
            return None
        rule, samples = self._rule(r, r.request)
        plan = self._plan(depth, r.budget, samples)
        return Growth(r, list(r.tokens), rule, depth, len(r.tokens), samples, plan=plan, frontier=[-1])

    def _room(self, depth: int, budget: int) -> int:
        """Not more than there are slots for."""
        return min(super()._room(depth, budget), budget)

    def _expand(self, growths: list[Growth], level: int) -> None:
        """One forward of the first layers over the frontiers of all requests; first over the last token of each."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for g in growths:
            start, base = len(tokens), len(g.context) - 1
            depth, parents = frontier_shape(g) if level else ([0], [])
            tokens += [g.tree.tokens[n] for n in g.frontier] if level else g.context[-1:]
            positions += [base + d for d in depth]
            entries = np.array([-1, *(p + 1 for p in parents)], dtype=np.int64)  # the last token, then what is expanded
            slots = np.concatenate([g.view.slots, g.view.room[: len(entries)]])
            segments.append(Segment(start, len(tokens), base, slots, entries))
        rows = np.arange(len(tokens))
        batch = Batch(np.array(tokens), np.array(positions), segments, rows, layers=self.layers)
        unpack(growths, self.runner.forward(batch).logits.float())
