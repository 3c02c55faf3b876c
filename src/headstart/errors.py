"""What can go wrong through no fault of ours. Each message says what was wrong, and what to do next."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class HeadstartError(Exception):
    """Base of every error that a user can cause. The command line prints it as one sentence."""


class BadInput(HeadstartError, ValueError):
    """A value that cannot be used: a prompt, a parameter, an option."""


class ConfigError(HeadstartError, ValueError):
    """An option that is unknown, contradictory or not available here."""


class ModelError(HeadstartError):
    """A model that cannot be found, read or run."""


class RequestFailed(HeadstartError):
    """The engine could not finish a request; the cause is chained."""


class FormFailed(RequestFailed, BadInput):
    """The form that an answer was to have could not be followed to its end: one that is simpler may be."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean ...?' for the closest known name, or the whole list when nothing is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."


def parse_json(text: str, where: str) -> Any:
    """What a user's file holds at this place; a place that names no line gets the one where it breaks."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if ", line" not in where else ""
        raise BadInput(f"{where}{line}: broken JSON ({error.msg}).") from None
    except (ValueError, RecursionError):  # a number with thousands of digits; brackets without end
        raise BadInput(f"{where}: this JSON cannot be read.") from None
