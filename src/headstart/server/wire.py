"""Answers on their way to a client that may leave at any moment: work ends when it does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from headstart.errors import HeadstartError
from headstart.server.logs import STRAIGHT
from headstart.server.protocol import error

log = logging.getLogger("headstart.server")
T = TypeVar("T")
END = b"data: [DONE]\n\n"
LONGEST = 800  # characters of a message
STALLED = 60.0  # seconds after which a client that takes nothing is given up


def say(status: int, message: str, kind: str = "invalid_request_error", **headers: str) -> JSONResponse:
    """One sentence in OpenAI's shape."""
    return JSONResponse(error(_short(message), kind), status, headers=headers or None)


def _short(message: str) -> str:
    """Who sends much that is wrong does not get all of it back."""
    return message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} [...] {message[-LONGEST // 2 :]}"


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has put everything away."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_left(receive: Receive, work: Awaitable[T], *signs: Coroutine[Any, Any, None]) -> T:
    """The result of this work; cancelled, where the client leaves first, or a sign comes that it is as good as gone."""
    task, watches = asyncio.ensure_future(work), [asyncio.create_task(sign) for sign in (_left(receive), *signs)]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        await end(task, *watches)


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class EventStream(Response):
    """Server-sent events. The client is told of a success when the first is there; an error behind it is an event, too."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        headers: Mapping[str, str] | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`after` is called at the end, whatever became of the events."""
        self.events, self.after, self.status_code, self.background = events, after, 200, None
        self._begun = False
        self._since: float | None = None  # when the write began that the client does not take
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._pump(send, scope.get(STRAIGHT, send)), self._stalled())
        except ClientLeft:
            if not self._begun:
                raise
        finally:
            await self.events.aclose()
            self.after()

    async def _stalled(self) -> None:
        """A client that reads nothing holds a place that others wait for."""
        while self._since is None or time.monotonic() - self._since < STALLED:
            await asyncio.sleep(STALLED / 4)

    async def _pump(self, send: Send, straight: Send) -> None:
        """Layers look at how an answer begins. With each event, they would take as long as writing it."""

        async def write(data: bytes, more: bool = True) -> None:
            self._since = time.monotonic()
            await straight({"type": "http.response.body", "body": data, "more_body": more})
            self._since = None

        first = await anext(self.events, None)
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if first is not None:
                await write(event(first))
            async for data in self.events:
                await write(event(data))
        except HeadstartError as failure:
            await write(event(error(str(failure), "server_error")))
        except Exception as failure:
            log.error("a stream broke", exc_info=failure)
            await write(event(error("Something broke inside the server; its log says what.", "server_error")))
        await write(END, more=False)
