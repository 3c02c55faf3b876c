"""Logs: one line for each request at its end, as text or as JSON, and the request's id in every line written meanwhile.

No line holds prompts, answers, headers or keys: what is told of a request are the numbers of its `Account`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.core import Stats

log = logging.getLogger("headstart.server")
STRAIGHT = "headstart.send"  # past every layer, for what follows the start of an answer
HEADER = "x-request-id"
LOOKING = ("GET", "HEAD", "OPTIONS")  # probes and scrapes come every few seconds, and say nothing when they go well
OTHER = "other"  # than our routes: in metrics, anybody could make up as many as they like
LONGEST = 200  # characters of a path that is none of ours


# ------------------------------------------------------------------ one request
@dataclass
class Account:
    """One request over HTTP, as its line and its span tell it."""

    id: str = ""
    method: str = ""
    route: str = ""
    status: int | None = None  # None: nobody was there to be told
    prompt_tokens: int | None = None  # None: it came to no prompt
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)  # one for each answer
    seconds_to_first_token: float | None = None
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    trace_id: str | None = None
    arrived: int = field(default_factory=time.time_ns)
    _began: float = field(default_factory=time.perf_counter)

    def add_tokens(self, count: int, seconds: float, first: bool) -> None:
        """Of several answers, the first one to begin counts."""
        self.completion_tokens += count
        if first:
            before = self.seconds_to_first_token
            self.seconds_to_first_token = seconds if before is None else min(before, seconds)

    def calls_tools(self) -> None:
        """An answer that stopped turned out to call tools."""
        if "stop" in self.finish_reasons:
            self.finish_reasons[self.finish_reasons.index("stop")] = "tool_calls"

    def add_stats(self, stats: Stats) -> None:
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    def close(self, route: str) -> None:
        self.route, self.seconds = route, time.perf_counter() - self._began

    def fields(self) -> dict[str, Any]:
        out: dict[str, Any] = {"method": self.method, "route": self.route, "status": self.status}
        if self.prompt_tokens is not None:
            out |= {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "finish_reasons": self.finish_reasons,
                "seconds_to_first_token": _rounded(self.seconds_to_first_token),
                "drafted": self.drafted,
                "accepted": self.accepted,
            }
        out["seconds"] = _rounded(self.seconds)
        return out | ({"trace_id": self.trace_id} if self.trace_id else {})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


_current: ContextVar[Account | None] = ContextVar("headstart_request", default=None)


def account() -> Account:
    """Of the request that is being handled here; one that nobody reads, where there is none."""
    return _current.get() or Account()


class Watch:
    """Stands around everything else: gives each request an account and an id, and tells how it ended."""

    def __init__(
        self,
        app: ASGIApp,
        trace: Callable[[Account, Mapping[str, str]], None] | None = None,
        count: Callable[[str, int | None], None] = lambda route, status: None,
    ) -> None:
        self.app, self.trace, self.count = app, trace, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own = Account(f"req-{uuid.uuid4().hex}", scope["method"])
        _current.set(own)  # and not reset: who reports an exception stands further out, in the same task

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                own.status = message["status"]
                MutableHeaders(scope=message).setdefault(HEADER, own.id)
            await send(message)

        scope[STRAIGHT] = send
        try:
            await self.app(scope, receive, watched)
        except Exception:
            own.status = own.status or 500  # as it is about to be answered
            raise
        finally:
            own.close(_route(scope))
            self.count(own.route if scope.get("route") is not None else OTHER, own.status)
            if self.trace is not None:
                self.trace(own, Headers(scope=scope))
            _tell(own)


def _route(scope: Scope) -> str:
    """One of ours by its name; else what was asked for, in characters that cannot pretend to be another line."""
    path = getattr(scope.get("route"), "path", None)
    return path if path is not None else quote(scope["path"], safe="/")[:LONGEST]


def _tell(own: Account) -> None:
    looked = own.method in LOOKING and (own.status or 0) < 400
    log.log(logging.DEBUG if looked else logging.INFO, "request ended", extra={"fields": own.fields()})


# ------------------------------------------------------------------ how lines look
class WithRequest(logging.Filter):
    """Lets everything through, with the id of the request that it belongs to."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = account().id
        return True


class TextForm(logging.Formatter):
    """`time level logger [request id] message name=value ...`, and tracebacks below it."""

    def format(self, record: logging.LogRecord) -> str:
        told = _told(record)
        head = f"{told.pop('time')} {told.pop('level')} {told.pop('logger')} "
        name, message, trace = told.pop("request_id", ""), told.pop("message"), told.pop("exception", "")
        pairs = "".join(f" {key}={_plain(value)}" for key, value in told.items())
        return head + (f"[{name}] " if name else "") + _one_line(message) + pairs + (f"\n{trace}" if trace else "")


class JsonForm(logging.Formatter):
    """One object on each line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_told(record), default=str)


FORMS: Mapping[str, type[logging.Formatter]] = {"text": TextForm, "json": JsonForm}


def _told(record: logging.LogRecord) -> dict[str, Any]:
    out: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    if name := getattr(record, "request_id", ""):
        out["request_id"] = name
    out |= getattr(record, "fields", {})
    if record.exc_info:
        out["exception"] = logging.Formatter().formatException(record.exc_info)
    return out


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _one_line(text: str) -> str:
    """What comes from outside may hold line breaks, or codes that terminals obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def written(level: str, form: str = "text", to: TextIO | None = None) -> Iterator[None]:
    """Ours from this level on, and warnings of everybody else, to standard error unless told otherwise."""
    handler = logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(FORMS[form]())
    handler.addFilter(WithRequest())
    root, ours = logging.getLogger(), logging.getLogger("headstart")
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(level.upper())
    try:
        yield
    finally:
        ours.setLevel(before)
        root.removeHandler(handler)
