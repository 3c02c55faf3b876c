"""Who may come in: with a key, one after the other, not too many, with no more than they may bring, and nobody when the server
closes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.errors import BadInput, HeadstartError
from headstart.server.wire import say

OPEN = frozenset(["/health", "/ready", "/version", "/", "/page.css", "/page.js"])  # paths that need no key
PAUSE = 3  # rounds of the event loop for one request: its own, one in which listeners are woken, one in which they send
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


class Turns:
    """One request at a time is taken in. To read one takes longer than to send a token to all who are being answered; so
    between two that came together, the event loop sends what is there."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def mine(self) -> None:
        if self._taken:
            self._waiting.append(turn := asyncio.get_running_loop().create_future())
            await turn
        else:
            self._taken = True
            self._later(PAUSE)

    def _later(self, rounds: int) -> None:
        asyncio.get_running_loop().call_soon(self._later, rounds - 1) if rounds else self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has left
                turn.set_result(None)
                self._later(PAUSE)
                return
        self._taken = False


class Guard:
    """Stands before the app: who has no key gets no further, and a body ends where it may."""

    def __init__(self, app: ASGIApp, gate: Gate, max_body: int) -> None:
        self.app, self.gate, self.max_body, self.turns = app, gate, max_body, Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.turns.mine()
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
            if message["type"] == "http.request" and not message.get("more_body"):
                await self.turns.mine()  # what is there is read now
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise HTTPException(413, self._too_large(size))
            return message

        return bounded

    def _too_large(self, size: int) -> str:
        return f"The body has {size} bytes or more; this server takes at most {self.max_body}."
