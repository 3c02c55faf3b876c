"""Who may come in: with a key, not too many at once, with no more than they may bring, and nobody when the server closes."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.errors import BadInput, HeadstartError
from headstart.server.wire import say

OPEN = frozenset(["/health", "/ready", "/version", "/", "/page.css", "/page.js"])  # paths that need no key
RETRY_AFTER = 1  # seconds that who was turned away is asked to wait


class Busy(HeadstartError):
    """Too many wait already."""


class Closing(HeadstartError):
    """The server takes nothing new on."""


@dataclass
class Gate:
    most: int  # requests that run or wait
    keys: Sequence[str] = ()
    inside: int = 0
    turned_away: int = 0
    closing: bool = False

    def knows(self, authorization: str | None) -> bool:
        """Is this one of the keys? It takes as long for each of them, whatever was sent."""
        if not self.keys:
            return True
        given = (authorization or "").removeprefix("Bearer ").encode()
        return sum(hmac.compare_digest(given, key.encode()) for key in self.keys) > 0

    @contextlib.contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """So many requests of one caller come in together, or not at all."""
        if self.closing:
            raise Closing("The server is shutting down: ask another one.")
        if count > self.most:
            raise BadInput(
                f"One request asks for {count} answers; this server takes {self.most} at once: ask in parts."
            )
        if self.inside + count > self.most:
            self.turned_away += 1
            raise Busy(
                f"{self.inside} requests run or wait already, and this server takes {self.most}: try again later."
            )
        self.inside += count
        try:
            yield
        finally:
            self.inside -= count


class Guard:
    """Stands before the app: who has no key gets no further, and a body ends where it may."""

    def __init__(self, app: ASGIApp, gate: Gate, max_body: int) -> None:
        self.app, self.gate, self.max_body = app, gate, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if get_route_path(scope) not in OPEN and not self.gate.knows(headers.get("authorization")):
            text = "This server needs a key: send it as 'Authorization: Bearer KEY'."
            await say(401, text, "authentication_error", **{"www-authenticate": "Bearer"})(scope, receive, send)
        elif (told := headers.get("content-length", "0")).isdigit() and int(told) > self.max_body:
            await say(413, self._too_large(int(told)))(scope, receive, send)
        else:
            await self.app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """Not all who send much say so beforehand."""
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise HTTPException(413, self._too_large(size))
            return message

        return bounded

    def _too_large(self, size: int) -> str:
        return f"The body has {size} bytes or more; this server takes at most {self.max_body}."
