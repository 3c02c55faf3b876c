"""What goes over the wire: OpenAI's completions and chat, with vLLM's names for what OpenAI has not.

A field that OpenAI knows and that means nothing here is accepted and left alone, so that clients need no change. One that
nobody knows is refused by name: else a slip would be silent.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from headstart.core import SamplingParams
from headstart.errors import BadInput, nearest

IDLE = frozenset(  # of OpenAI's own
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
        "prediction",
        "modalities",
        "moderation",
    ]
)
MOST_LOGPROBS, MOST_STOPS, MOST_WORDS, MOST_BIAS = 20, 16, 64, 1024  # in one request: more would cost all the others
COMPLETION_TOKENS = 16  # that a completion has where nobody says, as with OpenAI
SHARED = (  # names that are the same in SamplingParams
    "n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "seed",
)  # fmt: skip


LONGEST_NAME = 100  # characters of an unknown name that are looked at


def _check_texts(given: Any) -> None:
    """JSON may name one half of a character that takes two (a surrogate): no tokenizer reads that, and no answer can say it."""
    left = [given]
    while left:  # no recursion: nobody knows how deep it goes
        value = left.pop()
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += [item for item in value if isinstance(item, (str, list, dict))]
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError("A text holds half a character (a lone surrogate), which is no Unicode.") from error


def _calls_in_lists(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if any(not isinstance(message.get("tool_calls") or [], list) for message in messages):
        raise ValueError("tool_calls of a message should be a list.")
    return messages


# A list of a million wrong things is one mistake: to tell all of them takes minutes and gigabytes.
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Messages = Annotated[Objects, AfterValidator(_calls_in_lists)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # means nothing here


class Speculative(Strict):
    """What one request may say about speculation."""

    enabled: bool = True
    method: str | None = None
    max_tokens: int | None = None
    verification: str | None = None


class JsonSchema(Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None

    def form(self) -> dict[str, Any] | None:
        """As structured outputs."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        given = getattr(self, self.type)
        if given is None:
            raise BadInput(f"response_format of type {self.type!r} needs {self.type!r} beside it.")
        return {"json": given.schema_} if isinstance(given, JsonSchema) else {self.type: given}


class Asked(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="allow")
    KIND: ClassVar[str] = ""  # what ids begin with

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIAS)] | None = None
    response_format: ResponseFormat | None = None
    # not OpenAI's: vLLM's names
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = Field([], max_length=MOST_WORDS)
    bad_words: list[str] = Field([], max_length=MOST_WORDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")
    return_token_ids: bool = False
    # ours
    speculative: Speculative | bool | str | None = None
    show_drafts: bool = False
    metrics: bool = False

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        """OpenAI's clients may send null for what they do not say."""
        _check_texts(given)
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _know_all(self) -> Asked:
        for name in self.model_extra or {}:
            if name not in IDLE:
                name = name[:LONGEST_NAME]
                raise ValueError(f"Unknown field {name!r}.{nearest(name, type(self).model_fields)}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true.")
        if self.show_drafts and not self.stream:
            raise ValueError("show_drafts is for stream=true.")
        return self

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        form = self.structured_outputs
        if form is not None:  # what is false or null is not asked for
            form = {name: value for name, value in form.items() if value not in (None, False)}
        if self.response_format is not None and (own := self.response_format.form()) is not None:
            if form is not None:
                raise BadInput(
                    "response_format and structured_outputs both say what form the answer has: leave one out."
                )
            form = own
        given = {name: getattr(self, name) for name in SHARED}
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form)

    @property
    def id(self) -> str:
        """The client's own, else one that is drawn."""
        if self.request_id is None:
            self.request_id = new_id(self.KIND)
        return self.request_id

    @property
    def count(self) -> int:
        """Answers that are to be made."""
        return max(1, self.n)

    def speculation(self) -> Any:
        own = self.speculative
        return own.model_dump() if isinstance(own, Speculative) else own


class CompletionAsked(Asked):
    KIND = "cmpl"

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: int | None = None
    logprobs: int | None = Field(None, le=MOST_LOGPROBS)
    echo: bool = False
    prompt_logprobs: int | None = Field(None, le=MOST_LOGPROBS)
    best_of: int | None = None
    suffix: str | None = None

    def params(self, most: int) -> SamplingParams:
        if self.suffix:
            raise BadInput("suffix is not available: this server writes on from a prompt.")
        if self.best_of not in (None, self.n):
            raise BadInput("best_of is not available beyond n: leave it out.")
        told = self.prompt_logprobs if self.prompt_logprobs is not None else self.logprobs if self.echo else None
        if told is not None and self.stream:
            raise BadInput("Log probabilities of the prompt are told in whole answers: leave out stream.")
        given = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.only_reads:  # a token is made all the same, and left out
            given = 1
        return replace(self.sampling(_within(given, most), self.logprobs), prompt_logprobs=told)

    @property
    def only_reads(self) -> bool:
        """Nothing is to be written: the prompt is to be judged."""
        return self.echo and self.max_tokens == 0 and not self.stream

    @property
    def count(self) -> int:
        return len(self.prompts()) * max(1, self.n)

    def prompts(self) -> list[Any]:
        """One prompt or many, texts or tokens -> many."""
        one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if one else list(self.prompt)


class ChatAsked(Asked):
    KIND = "chatcmpl"

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, le=MOST_LOGPROBS)
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def must_call(self) -> bool:
        """The answer has to be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")

    def params(self, most: int) -> SamplingParams:
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise BadInput("top_logprobs are for logprobs=true.")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(_within(most if given is None else given, most), logprobs)


class TokenizeAsked(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _whole_texts(cls, given: Any) -> Any:
        _check_texts(given)
        return given


class DetokenizeAsked(Strict):
    model: str | None = None
    tokens: Tokens


def _within(given: int, most: int) -> int:
    """What is asked, as far as there is room. What is no number of tokens stays, and is refused by name."""
    return min(given, max(1, most)) if given > 0 else given


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def error(message: str, kind: str = "invalid_request_error") -> Mapping[str, Any]:
    """As OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
