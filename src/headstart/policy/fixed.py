"""γ as given, or by the number of running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headstart.config import SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.policy import Choices, Load, Proposals, StepTimes, Wish, Wishes
from headstart.policy.explain import Explanation


class FixedPolicy:
    """Every request gets the configured number of nodes; a schedule (from, to, γ) caps it by batch size."""

    cuts = quiet = False

    def __init__(self, config: SpeculativeConfig, choices: Choices) -> None:
        self.config, self.choices = config, choices
        self._made: dict[tuple[tuple[str, ...], int], Wishes] = {}

    def enlist(self, request: Request, load: Load) -> bool:
        return True

    def rests(self, request: Request) -> bool:
        return False

    def ask(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Wishes]:
        if any(proposals):
            return [{} for _ in requests]
        return [
            self._wishes(tuple(self.choices(r)[:1]), nodes) if nodes else {}
            for r, nodes in zip(requests, self.most(requests, load), strict=True)
        ]

    def _wishes(self, names: tuple[str, ...], nodes: int) -> Wishes:
        """The same for all that have the same: nobody changes them."""
        if (names, nodes) not in self._made:
            wish = Wish(nodes, min(self.config.num_speculative_tokens, nodes))
            self._made[names, nodes] = dict.fromkeys(names, wish)
        return self._made[names, nodes]

    def most(self, requests: Sequence[Request], load: Load) -> list[int]:
        """Nodes that each request may have."""
        nodes = self.config.nodes
        for low, high, tokens in self.config.batch_size_schedule:
            if low <= load.num_running <= high:
                nodes = min(nodes, tokens)
        return [self._one(r, nodes) for r in requests]

    @staticmethod
    def _one(request: Request, nodes: int) -> int:
        own = request.speculation
        if not own.enabled:
            return 0
        return nodes if own.max_tokens is None else min(nodes, own.max_tokens)

    def holds(self) -> bool:
        return True

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        return [next(iter(own.values()), Tree()) for own in proposals]

    def is_quiet(self, request: Request) -> bool:
        return False

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        """Fixed means fixed."""

    def catch_up(self, busy: Callable[[], bool]) -> None:
        """Nothing was put aside."""

    def release(self, request: Request) -> None:
        """Nothing is kept."""

    def explain(self) -> Explanation:
        return Explanation("a schedule" if self.config.batch_size_schedule else "fixed")

    def plain_seconds(self, company: int, context: float = 0.0) -> float:
        """Nobody has measured."""
        return 0.0
