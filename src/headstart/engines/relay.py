"""The door before another engine's server: our keys, limits, logs and metrics' names, and behind it the child that answers.

What clients send under `/v1` is forwarded, and answers come back byte for byte. Where the child ends, so does the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Send

from headstart.engines import counters
from headstart.engines.launching import LOOK, MOMENT, RECENT, Child
from headstart.errors import BadInput, HeadstartError, parse_json
from headstart.server.app import ServerSettings, check_model, explain_errors, guard
from headstart.server.gate import RETRY_AFTER, Closing, Gate
from headstart.server.logs import HEADER, Watch, account
from headstart.server.metrics import LEFT
from headstart.server.protocol import COMPLETION_TOKENS, error
from headstart.server.wire import END, ClientLeft, EventStream, event, say, unless_left
from headstart.threads import beside
from headstart.version import VERSION

if TYPE_CHECKING:
    from headstart.server.tracing import Tracing

log = logging.getLogger("headstart.engines")
T = TypeVar("T")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KNOWN = (
    COMPLETIONS,
    CHAT,
    "/v1/models",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)  # that metrics tell by name
LENGTHS = {
    COMPLETIONS: "max_tokens",
    CHAT: "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
LIMITED = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n_predict",
    "max_length",
)  # engines' own names, too
OURS = {"speculative": True, "show_drafts": False, "metrics": False}  # fields that only we have, with what says nothing
EMPTY: dict[str, Any] = {}  # says nothing either
PASSED = ("accept", "traceparent", "tracestate")  # headers that go on to the child
METHODS = ["GET", "POST"]


class Gone(HeadstartError):
    """The child does not answer any more."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class Relay:
    """From a request of ours to one of the child's, and back."""

    def __init__(self, child: Child, settings: ServerSettings, gate: Gate) -> None:
        self.child, self.settings, self.gate = child, settings, gate
        key = child.launch.key
        self.client = httpx.AsyncClient(
            base_url=child.launch.url,
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._over = asyncio.Event()

    # ------------------------------------------------------------------ one request
    async def forward(self, request: Request) -> Response:
        path = get_route_path(request.scope)
        self._check_route(path)
        self.check_alive()
        content, count = self._content(request, path, await _body(request))
        with contextlib.ExitStack() as inside:
            if request.method == "POST":
                inside.enter_context(self.gate.enter(count))
            asked = self._request(request, path, content)
            answer = await unless_left(request.receive, self._in_time(self.client.send(asked, stream=True)))
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return Passed(self._events(answer), answer.status_code, after=inside.pop_all().close)
            return _whole(answer, await unless_left(request.receive, self._in_time(_read(answer))))

    def _check_route(self, path: str) -> None:
        """Nobody gets behind the door by a path with dots in it."""
        routes = self.child.launch.routes
        known = any(path == route or (route.endswith("/") and path.startswith(route)) for route in routes)
        if not known or any(part in (".", "..") for part in path.split("/")):
            raise HTTPException(404, f"There is no {path} here: this server has {', '.join(routes)}.")

    def _content(self, request: Request, path: str, body: bytes) -> tuple[bytes, int]:
        """What the child is sent, and how many answers that are."""
        files = request.headers.get("content-type", "").startswith("multipart/")
        if request.method != "POST" or files:
            return body, 1
        asked = self.told(path, parse_json(body.decode(errors="replace"), "The body"))
        return json.dumps(asked).encode(), _count(asked)

    def told(self, path: str, given: Any) -> dict[str, Any]:
        """In the child's words. What it does not have is left out where it says nothing, else refused."""
        if not isinstance(given, Mapping):
            raise BadInput("The body should be a JSON object.")
        launch = self.child.launch
        asked = {name: value for name, value in given.items() if value is not None}
        check_model(asked.get("model"), self.settings.name)
        _name_request(asked)
        for name, idle in (OURS | dict(launch.lacks)).items():
            if asked.pop(name, idle) not in (idle, EMPTY):
                raise BadInput(_refused(launch.engine, name))
        asked = {launch.renames.get(name, name): value for name, value in asked.items()}
        usual = dict(launch.usual) if path in (COMPLETIONS, CHAT) else {}
        return usual | self._within(path, asked) | {"model": self.settings.name}

    def _within(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """No longer than answers may be here; a completion where nobody says is as long as with us."""
        most, name = self.settings.max_output_tokens, LENGTHS.get(path)
        if name is not None and not any(other in asked for other in LIMITED):
            usual = COMPLETION_TOKENS if path == COMPLETIONS else most
            asked = asked | ({} if usual is None else {name: usual})
        if most is None:
            return asked
        return {k: min(_whole_number(k, v), most) if k in LIMITED else v for k, v in asked.items()}

    def _request(self, request: Request, path: str, content: bytes) -> httpx.Request:
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        headers[HEADER] = account().id
        if content:
            multipart = request.headers.get("content-type", "").startswith("multipart/")
            headers["content-type"] = request.headers["content-type"] if multipart else "application/json"
        url = httpx.URL(path=path, query=request.scope.get("query_string") or None)
        return self.client.build_request(request.method, url, content=content, headers=headers)

    async def _events(self, answer: httpx.Response) -> AsyncGenerator[bytes, None]:
        try:
            chunks = answer.aiter_raw()
            while (chunk := await self._in_time(anext(chunks, None))) is not None:
                yield chunk
        finally:
            await answer.aclose()

    # ------------------------------------------------------------------ the child's life
    def give_up(self) -> None:
        """What is not done by now is told so."""
        self._over.set()

    async def _in_time(self, work: Awaitable[T]) -> T:
        """The result of this work, unless we are shut down first, or the child breaks off."""
        task, over = asyncio.ensure_future(work), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Closing("The server was shut down before this answer was complete.")
        except httpx.HTTPError as failure:
            raise await self._broke(failure) from failure
        finally:
            for one in (task, over):
                one.cancel()
            found, _ = await asyncio.gather(task, over, return_exceptions=True)
            if isinstance(found, httpx.Response) and _is_cancelled():  # nobody will get it
                await found.aclose()

    async def _broke(self, failure: httpx.HTTPError) -> Gone:
        """It takes a moment from the last byte of a process to its end."""
        until = time.monotonic() + MOMENT
        while self.child.process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(LOOK / 4)  # on no thread: many may ask at once
        if self.child.process.poll() is not None:
            return Gone(self.ended())
        return Gone(f"{self.child.launch.engine} broke off: {failure!r}.", 502)

    def check_alive(self) -> None:
        if self.child.process.poll() is not None:
            raise Gone(self.ended())

    def ended(self) -> str:
        """For clients: nothing of its log but what that means."""
        why = self.child.cause(RECENT) or "the server's log says why."
        return f"{self.child.launch.engine} ended with code {self.child.process.poll()}: {why}"

    async def health(self) -> tuple[bool, str | None]:
        """Does it live, and what is wrong where it does not?"""
        launch = self.child.launch
        try:
            self.check_alive()
            status = (await self.client.get(launch.ready, timeout=5)).status_code
        except (Gone, httpx.HTTPError) as failure:
            return False, str(failure) or repr(failure)
        return (True, None) if status == 200 else (False, f"{launch.engine} answers {status} at {launch.ready}.")

    async def metrics(self) -> str:
        """What it tells; nothing where it does not."""
        try:
            answer = await self.client.get("/metrics", timeout=5)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == 200 else ""


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise ClientLeft from error


def _name_request(asked: dict[str, Any]) -> None:
    """The client's own id stands in our log, and in the header; vLLM's answers have it too."""
    given = asked.get("request_id")
    if isinstance(given, str) and given.isascii() and given.isprintable() and 0 < len(given) <= 128:
        account().id = given


def _refused(engine: str, name: str) -> str:
    if name == "speculative":
        return f"{engine} drafts for all requests as it was started: leave out 'speculative'."
    return f"{engine} has no {name!r} for a request: leave it out."


def _count(asked: Mapping[str, Any]) -> int:
    """Answers that are to be made."""
    prompt = asked.get("prompt")
    n = max(_whole_number(name, asked.get(name, 1)) for name in ("n", "best_of"))
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return max(1, n) * (len(prompt) if several and prompt else 1)


def _whole_number(name: str, value: Any) -> int:
    """What is none would be something else to the child than to us."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadInput(f"{name!r} should be a whole number from 0 on.")
    return value


# ------------------------------------------------------------------ answers
async def _read(answer: httpx.Response) -> bytes:
    try:
        return await answer.aread()
    finally:
        await answer.aclose()


def _whole(answer: httpx.Response, content: bytes) -> Response:
    """As it is; a mistake in OpenAI's shape, whatever shape the child has for it."""
    status = answer.status_code
    try:
        told = json.loads(content)
    except ValueError:
        told = None
    if status >= 400 and not (isinstance(told, Mapping) and isinstance(told.get("error"), Mapping)):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return say(status, _message(told) or content.decode(errors="replace").strip() or "It says no more.", kind)
    if isinstance(told, Mapping):
        _note_usage(told)
    return Response(content, status, media_type=answer.headers.get("content-type"))


def _message(told: Any) -> str:
    found = (
        next((told[name] for name in ("message", "error", "detail") if told.get(name)), "")
        if isinstance(told, dict)
        else ""
    )
    return found if isinstance(found, str) else json.dumps(found)


def _note_usage(told: Mapping[str, Any]) -> None:
    """For the request's line in the log."""
    usage, own = told.get("usage"), account()
    if isinstance(usage, Mapping) and isinstance(usage.get("prompt_tokens"), int):
        own.prompt_tokens, own.completion_tokens = usage["prompt_tokens"], int(usage.get("completion_tokens") or 0)
    choices = told.get("choices")
    if isinstance(choices, list):
        own.finish_reasons += [
            str(c["finish_reason"]) for c in choices if isinstance(c, dict) and c.get("finish_reason")
        ]


class Passed(EventStream):
    """Events that somebody else has made: byte for byte. Where they break off, one more says why."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], status: int, after: Callable[[], None]) -> None:
        super().__init__(chunks, after=after)  # type: ignore[arg-type]  # only our own pump looks at them
        self.chunks, self.status_code = chunks, status

    async def _pump(self, send: Send, straight: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            self._since = time.monotonic()
            await straight({"type": "http.response.body", "body": data, "more_body": more})
            self._since = None

        first = await anext(self.chunks, b"")
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await write(first)
            async for chunk in self.chunks:
                await write(chunk)
        except HeadstartError as failure:
            await write(b"\n\n" + event(error(str(failure), "server_error")) + END)
        await write(b"", more=False)


# ------------------------------------------------------------------ metrics
class Told(Collector):
    """What the child has told, and what we have counted at the door."""

    def __init__(self, prefix: str, model: str, drafter: str, gate: Gate) -> None:
        self.prefix, self.model, self.drafter, self.gate = prefix, model, drafter, gate
        self._answered: dict[tuple[str, str], int] = defaultdict(int)
        self._theirs: list[Metric] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def answered(self, route: str, status: int | None) -> None:
        self._answered[route, str(status or LEFT)] += 1

    def text(self, child: str) -> bytes:
        self._theirs = counters.translate(child, self.prefix, self.model, self.drafter)
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._theirs
        labels = ["model_name", "route", "status"]
        family = CounterMetricFamily(
            f"{self.prefix}:http_requests", "Requests over HTTP, refused ones too.", labels=labels
        )
        for (route, status), count in sorted(self._answered.items()):
            family.add_metric([self.model, route, status], count)
        yield family
        away = CounterMetricFamily(
            f"{self.prefix}:requests_turned_away", "Requests that found the queue full.", labels=["model_name"]
        )
        away.add_metric([self.model], self.gate.turned_away)
        yield away


# ------------------------------------------------------------------ the app
def create_relay(
    child: Child,
    settings: ServerSettings,
    at_once: int,
    drafter: str = "none",
    tracing: Tracing | None = None,
) -> FastAPI:
    """`drafter` is the method that metrics of speculation are told for."""
    app = FastAPI(title="Headstart", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gate = gate = Gate(at_once + settings.max_queue, settings.keys)
    app.state.relay = relay = Relay(child, settings, gate)
    app.state.give_up, app.state.died = relay.give_up, False
    told = Told(settings.metrics_prefix, settings.name, drafter, gate)
    guard(app, gate, settings)
    app.add_middleware(Watch, trace=tracing, count=told.answered)
    explain_errors(app)

    @app.exception_handler(Gone)
    async def gone(_: Request, failure: Gone) -> Response:
        return say(failure.status, str(failure), "server_error", **{"retry-after": str(RETRY_AFTER)})

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(told.text(await relay.metrics()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> Any:
        alive, why = await relay.health()
        shown = {"status": "ok" if alive else "failed", "restarts": 0, "last_error": why}
        return JSONResponse(shown, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> Any:
        takes = not gate.closing and child.process.poll() is None
        return JSONResponse({"ready": takes}, 200 if takes else 503)

    @app.get("/version")
    async def version() -> Any:
        return {"version": VERSION}

    for path in (
        *KNOWN,
        *(r for r in child.launch.routes if not r.endswith("/") and r not in KNOWN),
        "/v1/{path:path}",
    ):
        app.add_api_route(path, relay.forward, methods=METHODS)
    return app


def watched(app: FastAPI) -> contextlib.AbstractContextManager[None]:
    """The server stops where its child has ended by itself; `app.state.died` tells that."""
    child = app.state.relay.child

    def look(over: threading.Event) -> None:
        while not over.wait(LOOK):
            if child.process.poll() is not None and not app.state.gate.closing:
                app.state.died = True
                log.error("%s", app.state.relay.ended())
                app.state.stop()
                return

    return beside(look, "headstart-child")
