"""Which policy a configuration asks for."""

from __future__ import annotations

from headstart.config import SpeculativeConfig
from headstart.policy import Choices, Policy
from headstart.policy.adaptive import AdaptivePolicy
from headstart.policy.ahead import AheadPolicy
from headstart.policy.fixed import FixedPolicy
from headstart.policy.watching import WatchingPolicy


def make_policy(config: SpeculativeConfig, choices: Choices, ahead: bool = False) -> Policy:
    """`ahead`: the device is given steps before the last one is known."""
    if config.policy != "adaptive":
        return (WatchingPolicy if config.policy == "watch" else FixedPolicy)(config, choices)
    return AheadPolicy(config, choices) if ahead else AdaptivePolicy(config, choices)
