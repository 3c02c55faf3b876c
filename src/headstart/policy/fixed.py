"""γ as given, or by the number of running requests."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.config import SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.policy import Load, StepTimes


class FixedPolicy:
    """Every request gets the configured number of nodes; a schedule (from, to, γ) caps it by batch size."""

    cuts = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config

    def budget(self, requests: Sequence[Request], load: Load) -> list[int]:
        nodes = self.config.nodes
        for low, high, tokens in self.config.batch_size_schedule:
            if low <= load.num_running <= high:
                nodes = min(nodes, tokens)
        return [self._one(r, nodes) for r in requests]

    def _one(self, request: Request, nodes: int) -> int:
        own = request.speculation
        if not own.enabled:
            return 0
        return nodes if own.max_tokens is None else min(nodes, own.max_tokens)

    def is_quiet(self, request: Request) -> bool:
        return False

    def keep(
        self, requests: Sequence[Request], names: Sequence[str], trees: Sequence[Tree], load: Load
    ) -> list[list[int]] | None:
        return None

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """Fixed means fixed."""

    def release(self, request: Request) -> None:
        """Nothing is kept."""
