"""Headstart: language models, several times faster, with the same output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headstart.core import Chunk, Completion, Draft, Output, RequestView, SamplingParams, Stats, Tree, Verdict, View
from headstart.errors import BadInput, ConfigError, HeadstartError, ModelError, RequestFailed
from headstart.llm import LLM
from headstart.version import VERSION

if TYPE_CHECKING:
    from headstart.drafters import Drafter, register

__version__ = VERSION

__all__ = [
    "LLM",
    "BadInput",
    "Chunk",
    "Completion",
    "ConfigError",
    "Draft",
    "Drafter",
    "HeadstartError",
    "ModelError",
    "Output",
    "RequestFailed",
    "RequestView",
    "SamplingParams",
    "Stats",
    "Tree",
    "Verdict",
    "View",
    "register",
]


def __getattr__(name: str) -> Any:
    """`Drafter` and `register` come from headstart.drafters on first use."""
    if name in ("Drafter", "register"):
        from headstart import drafters

        return getattr(drafters, name)
    raise AttributeError(f"module 'headstart' has no attribute {name!r}")
