"""The routes: OpenAI's API and what operators need, around one LLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headstart.errors import BadInput, ConfigError, HeadstartError
from headstart.server.answers import Answers
from headstart.server.gate import RETRY_AFTER, Busy, Closing, Gate, Guard
from headstart.server.logs import HEADER, Watch, account
from headstart.server.metrics import LEFT, Metrics
from headstart.server.openapi import describe
from headstart.server.playground import add_playground
from headstart.server.protocol import ChatAsked, CompletionAsked, DetokenizeAsked, TokenizeAsked, now
from headstart.server.wire import ClientLeft, EventStream, say, unless_left
from headstart.version import VERSION

if TYPE_CHECKING:
    from headstart.llm import LLM
    from headstart.server.tracing import Tracing

log = logging.getLogger("headstart.server")


@dataclass(frozen=True)
class ServerSettings:
    """What the server adds to the LLM's own options."""

    name: str = "smollm2"  # under which clients ask for the model
    keys: Sequence[str] = ()
    max_queue: int = 256  # requests that wait, beside those that run
    max_body: int = 4 << 20  # bytes
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    cors_origins: Sequence[str] = ()
    metrics_prefix: str = "headstart"  # "vllm", for dashboards that exist


def create_app(llm: LLM, settings: ServerSettings | None = None, tracing: Tracing | None = None) -> FastAPI:
    settings = settings or ServerSettings()
    app = FastAPI(title="Headstart", version=VERSION, docs_url=None, redoc_url=None)
    app.state.gate = gate = Gate(llm.engine.config.max_num_seqs + settings.max_queue, settings.keys)
    app.state.give_up = lambda: llm.end_all(Closing("The server was shut down before this answer was complete."))
    meters = Metrics(llm, gate, settings.name, settings.metrics_prefix)
    answers = Answers(llm, settings.name, meters, settings.max_prompt_tokens, settings.max_output_tokens)
    guard(app, gate, settings)
    app.add_middleware(Watch, trace=tracing, count=meters.answered)
    explain_errors(app)
    add_playground(app, llm, meters, settings.name)

    async def answer(request: Request, asked: CompletionAsked | ChatAsked) -> Any:
        own = account()
        own.id = asked.id
        check_model(asked.model, settings.name)
        with contextlib.ExitStack() as inside:
            inside.enter_context(gate.enter(asked.count))
            order = await answers.order(asked)
            own.prompt_tokens = sum(map(len, order.prompts))
            if not asked.stream:
                return JSONResponse(await unless_left(request.receive, answers.whole(order)))
            return EventStream(answers.stream(order), after=inside.pop_all().close)

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionAsked) -> Any:
        return await answer(request, asked)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatAsked) -> Any:
        return await answer(request, asked)

    @app.get("/v1/models")
    async def models() -> Any:
        about = {"id": settings.name, "object": "model", "created": now(), "owned_by": "headstart"}
        return {"object": "list", "data": [about | {"max_model_len": llm.engine.max_len}]}

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeAsked) -> Any:
        check_model(asked.model, settings.name)
        if (asked.prompt is None) == (asked.messages is None):
            raise BadInput("Give either prompt or messages.")
        if asked.messages is not None:
            tokens = await answers.tokens_of(ChatAsked.model_validate({"messages": asked.messages}))
        else:
            tokens = await asyncio.to_thread(llm.tokenizer.encode, asked.prompt or "", asked.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": llm.engine.max_len}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeAsked) -> Any:
        check_model(asked.model, settings.name)
        size = llm.engine.runner.vocab_size
        if bad := [t for t in asked.tokens if not 0 <= t < size]:
            raise BadInput(f"Token {bad[0]} is outside the vocabulary of {size}.")
        return {"prompt": await asyncio.to_thread(llm.tokenizer.decode, asked.tokens, False)}

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> Any:
        own = llm.health
        told = {"status": "ok" if own.alive else "failed", "restarts": own.restarts, "last_error": own.last_error}
        return JSONResponse(told, 200 if own.alive else 503)

    @app.get("/ready")
    async def ready() -> Any:
        return JSONResponse({"ready": not gate.closing}, 503 if gate.closing else 200)

    @app.get("/version")
    async def version() -> Any:
        return {"version": VERSION}

    describe(app, keys=bool(settings.keys))
    return app


def check_model(asked: str | None, name: str) -> None:
    if asked not in (None, "", name):
        raise HTTPException(404, f"There is no model {asked!r} here; this server has {name!r}.")


# ------------------------------------------------------------------ around every request
def guard(app: FastAPI, gate: Gate, settings: ServerSettings) -> None:
    app.add_middleware(Guard, gate=gate, max_body=settings.max_body)
    if settings.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )


def explain_errors(app: FastAPI) -> None:
    """One sentence in OpenAI's shape for whatever goes wrong."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, failure: RequestValidationError) -> Response:
        return say(400, _first_of(failure.errors()))

    @app.exception_handler(HeadstartError)
    async def mistake(_: Request, failure: HeadstartError) -> Response:
        if isinstance(failure, Busy):
            return say(429, str(failure), "rate_limit_error", **{"retry-after": str(RETRY_AFTER)})
        if isinstance(failure, Closing):
            return say(503, str(failure), "server_error", **{"retry-after": str(RETRY_AFTER)})
        if isinstance(failure, (BadInput, ConfigError)):
            return say(400, str(failure))
        log.error("a request failed: %s", failure, exc_info=failure)
        return say(500, str(failure), "server_error")

    @app.exception_handler(HTTPException)
    async def refused(_: Request, failure: HTTPException) -> Response:
        return say(failure.status_code, str(failure.detail), **(failure.headers or {}))

    @app.exception_handler(ClientLeft)
    async def left(_: Request, failure: ClientLeft) -> Response:
        return Response(status_code=LEFT)

    @app.exception_handler(Exception)
    async def broken(_: Request, failure: Exception) -> Response:
        log.error("a request broke", exc_info=failure)
        why = "Something broke inside the server; its log says what."
        return say(500, why, "server_error", **{HEADER: account().id})  # nobody further out adds it


def _first_of(failures: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong, and where, of the first of them."""
    first = failures[0]
    if first["type"] == "json_invalid":
        return f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}."
    where = ".".join(str(part) for part in first["loc"][1:] if not str(part).startswith("function-"))
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}." if where and first["type"] != "value_error" else message
