"""Which policy a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from headstart.config import SpeculativeConfig
from headstart.core import Request
from headstart.policy import Policy
from headstart.policy.adaptive import AdaptivePolicy
from headstart.policy.fixed import FixedPolicy


def make_policy(config: SpeculativeConfig, drafter_of: Callable[[Request], str | None]) -> Policy:
    return AdaptivePolicy(config, drafter_of) if config.policy == "adaptive" else FixedPolicy(config)
