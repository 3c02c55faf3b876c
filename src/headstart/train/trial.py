"""A drafter as it is now, in the real engine: held-out prompts, greedily, with chains; what is accepted, how long steps take.

The engine runs on the weights that training has in memory: no copy, no second load. When a trial is over, its KV is gone, and
the target, the drafter and the random numbers are as they were: a run with trials takes the same steps as one without.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from headstart.config import EngineConfig, SpeculativeConfig
from headstart.core import Request, SamplingParams, Stats
from headstart.engine import Engine, StepFailed
from headstart.errors import HeadstartError
from headstart.llm import start_engine
from headstart.models.heads import Head
from headstart.models.load import Loaded
from headstart.progress import note

SHARE = 0.1  # of the time of a run, for trials, where nobody says how often they are made


@dataclass(frozen=True)
class Outcome:
    """What a trial saw. Acceptance and block efficiency are of all prompts; times are those of one request that is alone."""

    depth: int  # of the chains
    prompts: int
    tokens: int  # that were written
    block_efficiency: float  # tokens for each forward of the target
    acceptance: list[float]  # by position: share of the drafts whose token there was accepted
    plain_step: float  # seconds of a step without drafts, in an engine that has no drafter
    drafted_step: float  # seconds of a step with drafting, forward and verification
    seconds: float  # that the trial took

    @property
    def speedup(self) -> float:
        """A prediction for one request at a time, on the machine that trains."""
        return self.block_efficiency * self.plain_step / self.drafted_step if self.drafted_step else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup}

    def line(self) -> str:
        accepted = " ".join(f"{100 * a:.1f}" for a in self.acceptance)
        return (
            f"in the engine: block efficiency {self.block_efficiency:.3f}, accepted % by position {accepted}, "
            f"predicted speed-up {self.speedup:.2f} for one request here ({self.tokens} tokens, {self.seconds:.1f} s)"
        )


class Trials:
    """Trials of one head or draft model on the same prompts."""

    def __init__(
        self, target: Loaded, drafter: Head | Loaded, prompts: Sequence[list[int]], tokens: int, depth: int
    ) -> None:
        """tokens: at most so many are written for each prompt. Prompts that leave no room for them are passed over."""
        self.tokens = tokens
        self.draft = drafter if isinstance(drafter, Loaded) else None
        self.head = drafter if isinstance(drafter, Head) else None
        self.prompts = [p for p in prompts if len(p) + tokens <= target.max_len]
        method = self.head.spec.method if self.head else "draft_model"
        self.config = SpeculativeConfig(method=method, num_speculative_tokens=depth)
        self.engine_config = EngineConfig(max_num_seqs=max(1, len(self.prompts)), wide_weights=False)
        longest = max(map(len, self.prompts), default=0) + tokens + 2 * self.engine_config.page_size
        self.target = replace(target, max_len=min(target.max_len, longest))  # KV is made for so much, and no more
        self.broken = not self.prompts

    def run(self) -> Outcome | None:
        """None where the engine cannot run here, which is said once: training goes on without trials."""
        if self.broken:
            return None
        try:
            with borrowed(self.target.model, self.draft.model if self.draft else self.head):
                return self._run()
        except (HeadstartError, torch.OutOfMemoryError) as error:
            self.broken = True
            note(f"No trials in the engine from here on: {error}")
            return None

    def _run(self) -> Outcome:
        began, first = time.monotonic(), self.prompts[:1]
        with self._engine(SpeculativeConfig()) as engine:
            plain = self._alone(engine, first)
        with self._engine(self.config, self.draft, self.head) as engine:
            total = Stats.total(self._answer(engine, self.prompts))
            drafted = self._alone(engine, first)
        if not total.drafts and total.steps > 2 * len(self.prompts):
            raise HeadstartError("nothing was drafted.")
        accepted, depth = total.acceptance_by_position, self.config.num_speculative_tokens
        return Outcome(
            depth,
            len(self.prompts),
            total.tokens,
            total.block_efficiency,
            accepted + [0.0] * (depth - len(accepted)),
            plain,
            drafted,
            time.monotonic() - began,
        )

    @contextmanager
    def _engine(
        self, config: SpeculativeConfig, draft: Loaded | None = None, head: Head | None = None
    ) -> Iterator[Engine]:
        engine = start_engine(self.target, config, self.engine_config, draft=draft, head=head).engine
        try:
            yield engine
        finally:
            engine.close()

    def _answer(self, engine: Engine, prompts: Sequence[list[int]], ignore_eos: bool = False) -> list[Stats]:
        params = SamplingParams(temperature=0.0, max_tokens=self.tokens, ignore_eos=ignore_eos)
        requests = [Request(list(p), params, seed=0, eos_ids=self.target.eos_ids) for p in prompts]
        for request in requests:
            engine.add(request)
        try:
            while not engine.idle:
                engine.step()
        except StepFailed as failure:
            raise failure.__cause__ or failure from None
        return [r.stats for r in requests]

    def _alone(self, engine: Engine, prompts: Sequence[list[int]]) -> float:
        """Seconds of a step, of the second of two equal requests: what is compiled or captured on the way is there by then."""
        for _ in range(2):
            stats = self._answer(engine, prompts, ignore_eos=True)[0]
        return (stats.time_total - stats.time_to_first_token) / max(1, stats.steps - 1)


@contextmanager
def borrowed(*modules: Any) -> Iterator[None]:
    """Target and drafter for an engine, and afterwards as they were; nothing of the engine stays in memory."""
    models = [m for m in modules if hasattr(m, "set_attn_implementation")]  # heads have an attention of their own
    attentions = [m.config._attn_implementation for m in models]
    modes, device = [m.training for m in modules], next(modules[0].parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for module in modules:
            module.eval()
        tidy(device)
        try:
            yield
        finally:
            for module, learning in zip(modules, modes, strict=True):
                module.train(learning)
            for model, attention in zip(models, attentions, strict=True):
                model.set_attn_implementation(attention)
            tidy(device)


def tidy(device: torch.device) -> None:
    """Give back what nobody holds: an engine sees memory as free that torch has let go."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
