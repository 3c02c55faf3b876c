"""Which policy a configuration asks for."""

from __future__ import annotations

from headstart.config import SpeculativeConfig
from headstart.policy import Choices, Policy
from headstart.policy.adaptive import AdaptivePolicy
from headstart.policy.fixed import FixedPolicy


def make_policy(config: SpeculativeConfig, choices: Choices) -> Policy:
    return AdaptivePolicy(config, choices) if config.policy == "adaptive" else FixedPolicy(config, choices)
