"""One number of draft tokens for the whole batch, where goodput is expected to be highest: the rule of SmartSpec.

Liu et al. 2024 (arXiv 2406.14066): with the share α of draft tokens that is accepted, as it was of late, a request makes
(1 - α^(k+1)) / (1 - α) tokens in a step with k draft tokens; goodput is that of all requests by the step's seconds. This is the
published rule to compare with (`headstart simulate`). Its seconds are our curves, which are closer than lines are.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.config import SpeculativeConfig
from headstart.core import Request, Tree, Verdict
from headstart.policy import Choices, Load, Proposals, StepTimes
from headstart.policy.costs import Costs, Errands
from headstart.policy.explain import Explanation
from headstart.policy.fixed import FixedPolicy

FIRST, WEIGHT = 0.7, 4.0  # α until drafts were seen, and for how many tokens that counts
RECENT = 0.98  # what is left of the past after one more step


class GoodputPolicy(FixedPolicy):
    def __init__(self, config: SpeculativeConfig, choices: Choices) -> None:
        super().__init__(config, choices)
        self.costs, self.errands = Costs(), Errands()
        self._right, self._tried = FIRST * WEIGHT, WEIGHT
        self._sizes: list[int] = []  # of the drafts on their way

    def holds(self) -> bool:
        return False

    def most(self, requests: Sequence[Request], load: Load) -> list[int]:
        tokens = self._best(requests, load)
        return [min(tokens, n) for n in super().most(requests, load)]

    def _best(self, requests: Sequence[Request], load: Load) -> int:
        """The number of tokens with the highest goodput."""
        served = [names[0] for r in requests if (names := self.choices(r))]
        if not served:
            return 0
        deepest = min(self.config.num_speculative_tokens, load.room)
        return max(range(deepest + 1), key=lambda k: self._goodput(k, len(requests), served, load))

    def _goodput(self, tokens: int, company: int, served: Sequence[str], load: Load) -> float:
        share = min(0.999, self._right / self._tried)
        made = company + len(served) * ((1 - share ** (tokens + 1)) / (1 - share) - 1)
        rows = company + len(served) * tokens + load.num_prefill_tokens
        drafting = self.errands.of(served[0], tokens, tokens * len(served))
        return made / (self.costs.of(rows, load.context) + drafting)

    def choose(self, requests: Sequence[Request], proposals: Sequence[Proposals], load: Load) -> list[Tree]:
        trees = super().choose(requests, proposals, load)
        self._sizes = [len(t) for t in trees]
        return trees

    def learn(self, times: StepTimes, requests: Sequence[Request], verdicts: Sequence[Verdict]) -> None:
        self.costs.learn(times.num_tokens, times.target, times.reach)
        for errand in times.errands:
            self.errands.learn(errand)
        drafts = [(len(v.accepted), n) for v, n in zip(verdicts, self._sizes, strict=True) if n]
        if drafts:
            self._right = RECENT * self._right + sum(right for right, _ in drafts)
            self._tried = RECENT * self._tried + sum(right + (right < size) for right, size in drafts)

    def explain(self) -> Explanation:
        return Explanation("goodput")
