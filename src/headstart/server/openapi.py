"""What answers look like, for the document at `/openapi.json`: clients are generated from it, and tests hold the server to it.

Requests describe their fields themselves, see `protocol`; what values those may have is checked further in and said here.
Answers are written as they are, without a model that checks each of them on its way out; so their shapes stand here. The tests
compare both with what the server takes and sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from headstart.server.gate import OPEN
from headstart.server.logs import HEADER
from headstart.server.protocol import IDLE, MOST_STOPS

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
WHERE = "#/components/schemas/"
Reason = Literal["stop", "length", "tool_calls", "abort"]


# ------------------------------------------------------------------ mistakes
class ErrorDetail(TypedDict):
    message: str
    type: str
    param: None
    code: None


class Error(TypedDict):
    """One sentence that says what is wrong, as OpenAI's clients expect it."""

    error: ErrorDetail


# ------------------------------------------------------------------ what all answers tell
class CachedTokens(TypedDict):
    cached_tokens: int


class PredictionTokens(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens


class DrafterCounts(TypedDict):
    drafted: int
    accepted: int


class Speculation(TypedDict):
    drafts: int
    drafted: int
    accepted: int
    acceptance_rate: float
    block_efficiency: float
    acceptance_by_position: list[float]
    wasted: float
    by_drafter: dict[str, DrafterCounts]
    speedup_estimate: float | None


class AnswerMetrics(TypedDict):
    """Where `metrics` is asked for: what speculation did, and the seconds that each part took."""

    speculative_decoding: Speculation
    seconds: dict[str, float]


class Draft(TypedDict):
    tokens: list[str]
    parents: list[int]
    origins: list[str]
    accepted: list[int]


class ShownDraft(TypedDict):
    """Where `show_drafts` is asked for. Pieces are texts, with the step and the place in it that each came from."""

    step: int
    pieces: list[tuple[str, int, int]]
    tokens: list[str]
    origins: list[str | None]
    draft: Draft


class Ended(TypedDict):
    """What each choice has."""

    index: int
    finish_reason: Reason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class Whole(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: NotRequired[AnswerMetrics]


class InPieces(TypedDict):
    id: str
    created: int
    model: str
    usage: NotRequired[Usage | None]
    metrics: NotRequired[AnswerMetrics]


# ------------------------------------------------------------------ completions
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # the first token of a prompt has none
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    decoded_token: str


class CompletionChoice(Ended):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]  # at each place, by token
    prompt_token_ids: NotRequired[list[int]]


class CompletionPiece(Ended):
    text: str
    logprobs: CompletionLogprobs | None
    speculation: NotRequired[ShownDraft]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(InPieces):
    """One event of a streamed answer. The last event is the text [DONE]; one that tells of an error may stand before it."""

    object: Literal["text_completion"]
    choices: list[CompletionPiece]


# ------------------------------------------------------------------ chat
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallPiece(ToolCall):
    index: int


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPiece]]


class ChatChoice(Ended):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class ChatPiece(Ended):
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    speculation: NotRequired[ShownDraft]


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(InPieces):
    """One event of a streamed answer. The last event is the text [DONE]; one that tells of an error may stand before it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


# ------------------------------------------------------------------ other routes
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(TypedDict):
    prompt: str


class Health(TypedDict):
    status: Literal["ok", "failed"]
    restarts: int
    last_error: str | None


class Ready(TypedDict):
    ready: bool


class Version(TypedDict):
    version: str


# ------------------------------------------------------------------ what requests may say
TOKEN: dict[str, Any] = {"type": "integer", "minimum": 0}
WORD: dict[str, Any] = {"type": "string", "minLength": 1}
SHARE, PENALTY = {"exclusiveMinimum": 0, "maximum": 1}, {"minimum": -2, "maximum": 2}


def _some(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["role"],
    "additionalProperties": True,  # templates may read more
}
FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "description": {"type": "string"}, "parameters": {"type": "object"}},
    "required": ["name"],
    "additionalProperties": True,
}
TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
    "required": ["function"],
    "additionalProperties": True,
}
FORM = {
    "properties": {
        "json": {"anyOf": [{"type": "object"}, {"type": "string"}], "description": "a JSON schema"},
        "regex": {"type": "string"},
        "choice": _some(WORD),
        "grammar": {"type": "string", "description": "in Lark's notation or in llama.cpp's GBNF"},
        "json_object": {"const": True},
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
LIMITS: dict[str, dict[str, Any]] = {
    "messages": {"items": MESSAGE, "minItems": 1},
    "tools": {"items": TOOL},
    "structured_outputs": FORM,
    "n": {"minimum": 1, "maximum": 256},
    "max_tokens": {"minimum": 0},  # 0 goes with echo alone
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 10_000},
    "top_k": {"minimum": -1},
    "top_p": SHARE,
    "typical_p": SHARE,
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10_000},
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "logprobs": {"minimum": 0},
    "prompt_logprobs": {"minimum": 0},
    "top_logprobs": {"minimum": 0},
    "bad_words": {"items": WORD},
    "stop_token_ids": {"items": TOKEN},
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]+$"}},
    "tokens": {"items": TOKEN},
}
EITHER: dict[str, list[dict[str, Any]]] = {  # where a field takes several shapes, these
    "prompt": [WORD, _some(WORD), _some(TOKEN), _some(_some(TOKEN))],
    "stop": [WORD, {"type": "array", "items": WORD, "maxItems": MOST_STOPS}, {"type": "null"}],
}
HELLO = [{"role": "user", "content": "Hello"}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "whole": {"prompt": "Once upon a time", "max_tokens": 20},
        "streamed": {"prompt": "Once upon a time", "stream": True, "stream_options": {"include_usage": True}},
        "told": {"prompt": ["One", "Two"], "logprobs": 2, "metrics": True, "return_token_ids": True},
        "read": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
        "plain": {"prompt": "Once upon a time", "temperature": 0, "speculative": False},
        "formed": {"prompt": "Yes or no?", "structured_outputs": {"choice": ["yes", "no"]}},
    },
    "/v1/chat/completions": {
        "whole": {"messages": HELLO, "max_tokens": 20},
        "streamed": {"messages": HELLO, "max_tokens": 20, "stream": True, "show_drafts": True},
        "told": {"messages": HELLO, "max_tokens": 20, "logprobs": True, "top_logprobs": 2},
        "formed": {"messages": HELLO, "max_tokens": 20, "response_format": {"type": "json_object"}},
    },
    "/tokenize": {"text": {"prompt": "Once upon a time"}, "chat": {"messages": HELLO}},
    "/detokenize": {"text": {"tokens": [1, 2, 3]}},
}


# ------------------------------------------------------------------ which route says what
@dataclass(frozen=True)
class Says:
    """One route: what it answers, and with which statuses it may refuse."""

    what: str
    content: Mapping[str, Any]  # media type -> shape
    refuses: tuple[int, ...] = ()
    failing: str = ""  # with a 503 of the same shape


REFUSALS = {
    400: "The request cannot be used.",
    401: "The key is missing or wrong.",
    404: "The server has another model.",
    413: "The body is too large.",
    429: "Too many requests run or wait: try again later.",
    503: "The server is shutting down: ask another one.",
}
HEADERS = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
ASKS, COMPUTES = (400, 404, 413), (400, 404, 413, 429, 503)
ROUTES = {
    "/v1/completions": Says("The answer.", {JSON: Completion, EVENTS: CompletionChunk}, COMPUTES),
    "/v1/chat/completions": Says("The answer.", {JSON: ChatCompletion, EVENTS: ChatCompletionChunk}, COMPUTES),
    "/v1/models": Says("The one model.", {JSON: Models}),
    "/tokenize": Says("Token ids.", {JSON: Tokens}, ASKS),
    "/detokenize": Says("The text.", {JSON: Text}, ASKS),
    "/stats": Says("What was done so far, and why it is drafted so.", {JSON: dict[str, Any]}),
    "/metrics": Says("Prometheus.", {TEXT: str}),
    "/health": Says("Alive.", {JSON: Health}, failing="The engine has ended for good."),
    "/ready": Says("Takes requests.", {JSON: Ready}, failing="The server is shutting down."),
    "/version": Says("Which version.", {JSON: Version}),
}


def describe(app: FastAPI, keys: bool = False) -> None:
    """Have the app's document say what its routes answer; with keys, that they need one."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(plain(), keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(document: dict[str, Any], keys: bool) -> dict[str, Any]:
    shapes, components = _shapes()
    parts = document.setdefault("components", {})
    known = parts.setdefault("schemas", {})
    known.update(components)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; nobody gets them here
        known.pop(name, None)
    if keys:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for name, shape in known.items():
        if name.endswith("Asked"):
            _limit(shape)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _illustrate(path, operation)
            operation["responses"] = _responses(path, shapes)
            if keys and path not in OPEN:
                operation["security"] = [{"key": []}]
    return document


def _limit(shape: dict[str, Any]) -> None:
    """Say which values of a request are usable, and that no other names are."""
    properties = shape["properties"]
    for name, about in properties.items():
        usual = [option for option in about.get("anyOf", [about]) if option.get("type") != "null"]
        if len(usual) == 1:
            usual[0] |= LIMITS.get(name, {})
        elif name in EITHER:
            about["anyOf"] = EITHER[name]
    if shape.pop("additionalProperties", None) is True:  # those that mean nothing here and are accepted
        properties |= {name: {"description": "means nothing here"} for name in sorted(IDLE)}
    shape["additionalProperties"] = False


def _illustrate(path: str, operation: dict[str, Any]) -> None:
    if "requestBody" in operation:
        examples = {name: {"value": value} for name, value in EXAMPLES.get(path, {}).items()}
        operation["requestBody"]["content"][JSON]["examples"] = examples


def _responses(path: str, shapes: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Each status with what is said about it; a path that is not in the table says nothing but that it answers."""
    says = ROUTES.get(path, Says("The answer.", {}))
    content = {kind: {"schema": shapes[path, kind]} for kind in says.content}
    out: dict[str, Any] = {"200": {"description": says.what} | ({"content": content} if content else {})}
    for status in sorted({*says.refuses, *(() if path in OPEN else (401,))}):
        out[str(status)] = _refusal(status)
    if says.failing:
        out["503"] = {"description": says.failing, "content": content}
    for about in out.values():
        about.setdefault("headers", {})[HEADER] = {"required": True, "schema": {"type": "string"}}
    return out


def _refusal(status: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "description": REFUSALS[status],
        "content": {JSON: {"schema": {"$ref": f"{WHERE}Error"}}},
    }
    if status in HEADERS:
        out["headers"] = {HEADERS[status]: {"required": True, "schema": {"type": "string"}}}
    return out


def _shapes() -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """The schema of what each route sends, by path and media type; and what they refer to."""
    wanted = {(path, kind): shape for path, says in ROUTES.items() for kind, shape in says.content.items()}
    inputs = [(key, "validation", TypeAdapter(shape)) for key, shape in [*wanted.items(), ((), Error)]]
    found, together = TypeAdapter.json_schemas(inputs, ref_template=WHERE + "{model}")  # type: ignore[arg-type]
    return {key: found[key, "validation"] for key in wanted}, together["$defs"]
