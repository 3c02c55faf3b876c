"""From what was asked to what is answered: prompts, and pieces of text in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headstart.core import Chunk, Completion, SamplingParams, Stats, TokenLogprobs, Tree
from headstart.errors import BadInput
from headstart.server import tools
from headstart.server.logs import account
from headstart.server.protocol import Asked, ChatAsked, CompletionAsked, now
from headstart.server.tools import Call, Dialect, ToolReader
from headstart.server.wire import end
from headstart.text import Spans

if TYPE_CHECKING:
    from headstart.llm import LLM
    from headstart.server.metrics import Metrics

LONG = 20_000  # characters from which a prompt is made into tokens beside the event loop


@dataclass
class Order:
    """One HTTP request: its prompts as tokens, and how they are answered."""

    asked: Asked
    prompts: list[list[int]]
    params: SamplingParams
    dialect: Dialect | None = None  # in which calls of tools are looked for
    created: int = field(default_factory=now)

    @property
    def count(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt(self, i: int) -> list[int]:
        """Of choice i."""
        return self.prompts[i // self.params.n]


class Answers:
    def __init__(
        self, llm: LLM, name: str, meters: Metrics, most_prompt: int | None = None, most_output: int | None = None
    ) -> None:
        self.llm, self.name, self.meters = llm, name, meters
        self._most_prompt, self._most_output = most_prompt, most_output

    # ------------------------------------------------------------------ what was asked
    async def order(self, asked: Asked) -> Order:
        """Says what is wrong with it before anything is computed."""
        dialect: Dialect | None = None
        if isinstance(asked, ChatAsked):
            dialect = self._dialect(asked)
            prompts = [await self.tokens_of(asked, asked.tools or () if dialect is not None else ())]
        else:
            assert isinstance(asked, CompletionAsked)
            prompts = [await self._beside(self._encode, p, size=len(p)) for p in asked.prompts()]
        if not prompts:
            raise BadInput("prompt is an empty list: give at least one prompt.")
        longest = max(map(len, prompts))
        if self._most_prompt is not None and longest > self._most_prompt:
            raise BadInput(f"The prompt has {longest} tokens; this server takes at most {self._most_prompt}.")
        room = self.llm.engine.max_len - longest
        params = asked.params(room if self._most_output is None else min(room, self._most_output))
        if dialect is not None and isinstance(asked, ChatAsked):
            params = _with_calls(asked, params, dialect)
        check = functools.partial(self.llm.check, prompts, params, speculative=asked.speculation())
        if params.structured_outputs is not None:  # a grammar may take a while to compile
            await asyncio.to_thread(check)
        else:
            check()
        return Order(asked, prompts, params, dialect)

    async def tokens_of(self, asked: ChatAsked, given: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Of a conversation in which the model is told about these tools."""
        make = functools.partial(self._chat, given=list(given) or None)
        return await self._beside(make, asked, size=sum(len(str(m)) for m in asked.messages))

    def _encode(self, prompt: str | list[int]) -> list[int]:
        return self.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _chat(self, asked: ChatAsked, given: list[dict[str, Any]] | None) -> list[int]:
        if not asked.messages:
            raise BadInput("messages is empty: give at least one message.")
        messages = [_as_text(m) for m in asked.messages]
        return self.llm.tokenizer.chat(messages, given, asked.chat_template_kwargs)

    @staticmethod
    async def _beside(make: Any, what: Any, size: int) -> list[int]:
        """Long texts take a while, and the others should not wait for them."""
        return await asyncio.to_thread(make, what) if size > LONG else make(what)

    def _dialect(self, asked: ChatAsked) -> Dialect | None:
        """In which the model calls tools, where it is told about some."""
        if asked.must_call and not asked.tools:
            raise BadInput("tool_choice needs tools.")
        if not asked.tools or asked.tool_choice == "none":
            return None
        tools.check(asked.tools)
        found = tools.dialect(getattr(self.llm.tokenizer.hf, "chat_template", None))
        if found is None:
            signs = ", ".join(d.sign for d in tools.DIALECTS)
            raise BadInput(f"tools are not available with this model: its chat template has none of {signs}.")
        return found

    # ------------------------------------------------------------------ the whole answer
    async def whole(self, order: Order) -> dict[str, Any]:
        """Nobody reads along, so nobody is woken for each token."""
        how = {"speculative": order.asked.speculation()}
        began = [asyncio.create_task(self.llm.agenerate(p, order.params, **how)) for p in order.prompts]
        try:
            outputs = await asyncio.gather(*began)
        except BaseException:
            await end(*began)
            self.meters.abandoned(order.count)
            raise
        done = [completion for output in outputs for completion in output.completions]
        stats = [completion.stats for completion in done]
        for completion in done:
            self.meters.whole(completion.finish_reason or "stop", completion.stats)
        out = self._frame(order, "chat.completion" if _is_chat(order) else "text_completion")
        prompts = [output.prompt_logprobs for output in outputs for _ in output.completions]
        out["choices"] = [self._choice(order, i, *both) for i, both in enumerate(zip(done, prompts, strict=True))]
        out["usage"] = usage(order, stats)
        if order.asked.metrics:
            out["metrics"] = metrics(stats)
        return out

    def _frame(self, order: Order, kind: str) -> dict[str, Any]:
        return {"id": order.asked.id, "object": kind, "created": order.created, "model": self.name}

    def _choice(
        self, order: Order, i: int, completion: Completion, prompt: Sequence[TokenLogprobs | None] | None
    ) -> dict[str, Any]:
        out: dict[str, Any] = {"index": i}
        reason = completion.finish_reason
        if _is_chat(order):
            text, calls = self._read_calls(order, completion.text)
            out["message"] = {"role": "assistant", "content": text if text or not calls else None}
            if calls:
                out["message"]["tool_calls"] = [call.to_dict() for call in calls]
                reason = _called(reason)
            out["logprobs"] = self._chat_logprobs(completion.logprobs)
        else:
            assert isinstance(order.asked, CompletionAsked)
            out |= self._completed(order.asked, order.prompt(i), completion, prompt)
        out["finish_reason"], out["stop_reason"] = reason, completion.stop_reason
        if order.asked.return_token_ids:
            out["token_ids"] = completion.token_ids
            out["prompt_token_ids"] = order.prompt(i)
        return out

    def _completed(
        self,
        asked: CompletionAsked,
        tokens: Sequence[int],
        completion: Completion,
        prompt: Sequence[TokenLogprobs | None] | None,
    ) -> dict[str, Any]:
        """The text of a completion and what is told about its tokens, and about the prompt's."""
        text, told = ("", completion.logprobs and []) if asked.only_reads else (completion.text, completion.logprobs)
        out: dict[str, Any] = {}
        if asked.prompt_logprobs is not None and prompt is not None:
            out["prompt_logprobs"] = [self._by_token(one) for one in prompt]
        if asked.echo:
            text = self._echo(tokens) + text
            if told is not None and prompt is not None:
                read = [one or TokenLogprobs(token, math.nan, {}) for token, one in zip(tokens, prompt, strict=True)]
                told = [*read, *told]
        return out | {"text": text, "logprobs": self._completion_logprobs(told, 0)}

    def _by_token(self, told: TokenLogprobs | None) -> dict[str, Any] | None:
        """As vLLM has it; the first token of a prompt has none."""
        if told is None:
            return None
        both = {told.token: told.logprob} | told.top
        decode = self.llm.tokenizer.decode
        return {str(t): {"logprob": max(p, -9999.0), "decoded_token": decode([t], False)} for t, p in both.items()}

    def _reader(self, order: Order) -> ToolReader | None:
        if order.dialect is None:
            return None
        hidden = self.llm.tokenizer.hf.all_special_tokens if order.dialect.marked else ()
        required = isinstance(order.asked, ChatAsked) and order.asked.must_call
        return ToolReader(order.dialect, required, [t for t in hidden if t != order.dialect.begin])

    def _read_calls(self, order: Order, text: str) -> tuple[str, list[Call]]:
        reader = self._reader(order)
        return reader.split(text, last=True) if reader is not None else (text, [])

    def _echo(self, prompt: Sequence[int]) -> str:
        return self.llm.tokenizer.decode(prompt, True)

    # ------------------------------------------------------------------ the answer in pieces
    async def stream(self, order: Order) -> AsyncGenerator[dict[str, Any], None]:
        options = order.asked.stream_options
        kind = "chat.completion.chunk" if _is_chat(order) else "text_completion"
        frame = self._frame(order, kind)
        stats: dict[int, Stats] = {}
        voices = [Voice(self._reader(order)) for _ in range(order.count)]
        sketches = [Sketch(self._decode(order)) for _ in range(order.count)] if order.asked.show_drafts else []
        how = {"speculative": order.asked.speculation(), "show_drafts": order.asked.show_drafts}
        with closing(self.meters.follow(order.count)) as follower:
            async with aclosing(self.llm.astream_all(order.prompts, order.params, **how)) as pieces:
                async for number, chunk in pieces:
                    index = number * order.params.n + chunk.index
                    follower.add(index, chunk)
                    if chunk.stats is not None:
                        stats[index] = chunk.stats
                    choice = self._delta(order, index, chunk, voices[index])
                    if sketches:
                        choice["speculation"] = sketches[index].of(chunk)
                    out = frame | {"choices": [choice]}
                    if options is not None and options.include_usage:
                        out["usage"] = usage(order, _in_order(stats)) if options.continuous_usage_stats else None
                    yield out
        last: dict[str, Any] = {}
        if options is not None and options.include_usage:
            last["usage"] = usage(order, _in_order(stats))
        if order.asked.metrics:
            last["metrics"] = metrics(_in_order(stats))
        if last:
            yield frame | {"choices": []} | last

    def _decode(self, order: Order) -> Callable[[Sequence[int]], str]:
        return lambda tokens: self.llm.tokenizer.decode(tokens, order.params.skip_special_tokens)

    def _delta(self, order: Order, index: int, chunk: Chunk, voice: Voice) -> dict[str, Any]:
        out: dict[str, Any] = {"index": index}
        first, reason = not voice.begun, chunk.finish_reason
        if _is_chat(order):
            out["delta"] = voice.delta(chunk)
            out["logprobs"] = self._chat_logprobs(chunk.logprobs)
            reason = _called(reason) if voice.calls else reason
        else:
            voice.begun = True
            echoes = first and isinstance(order.asked, CompletionAsked) and order.asked.echo
            out["text"] = (self._echo(order.prompt(index)) if echoes else "") + chunk.text
            out["logprobs"] = self._completion_logprobs(chunk.logprobs, voice.length)
            voice.length += len(chunk.text)
        out["finish_reason"], out["stop_reason"] = reason, chunk.stop_reason
        if order.asked.return_token_ids:
            out["token_ids"] = chunk.token_ids
        return out

    # ------------------------------------------------------------------ log probabilities
    def _chat_logprobs(self, told: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if told is None:
            return None
        return {"content": [self._token(t.token, t.logprob) | {"top_logprobs": self._top(t)} for t in told]}

    def _top(self, told: TokenLogprobs) -> list[dict[str, Any]]:
        return [self._token(token, value) for token, value in told.top.items()]

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text = self.llm.tokenizer.decode([token], False)
        return {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode())}

    def _completion_logprobs(self, told: list[TokenLogprobs] | None, offset: int) -> dict[str, Any] | None:
        if told is None:
            return None
        decode = self.llm.tokenizer.decode
        tokens = [decode([t.token], False) for t in told]
        offsets = list(itertools.accumulate(map(len, tokens[:-1]), initial=offset))
        top = [{decode([token], False): value for token, value in t.top.items()} or None for t in told]
        return {
            "tokens": tokens,
            "token_logprobs": [None if math.isnan(t.logprob) else max(t.logprob, -9999.0) for t in told],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }


def _with_calls(asked: ChatAsked, params: SamplingParams, dialect: Dialect) -> SamplingParams:
    """Where a call is required, the answer has its form; else a model may write one."""
    if not asked.must_call:
        return replace(params, skip_special_tokens=False) if dialect.marked else params
    if params.structured_outputs is not None:
        raise BadInput("A required tool and a response_format both say what form the answer has: leave one out.")
    form = dialect.form(tools.usable(asked.tools or [], asked.tool_choice), asked.parallel_tool_calls)
    return replace(params, structured_outputs=form)


class Voice:
    """One choice of a streamed answer: who has spoken, and how many tools were called."""

    def __init__(self, reader: ToolReader | None) -> None:
        self.begun, self.calls, self.length = False, 0, 0
        self._reader = reader

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        out: dict[str, Any] = {} if self.begun else {"role": "assistant"}
        self.begun = True
        if self._reader is None:
            return out | {"content": chunk.text}
        text, calls = self._reader.split(chunk.text, last=chunk.finish_reason is not None)
        if calls:
            out["tool_calls"] = [{"index": self.calls + i} | call.to_dict() for i, call in enumerate(calls)]
            self.calls += len(calls)
        return out | ({"content": text} if text else {})


class Sketch:
    """One choice's drafts, for people: where each piece of the text came from, and the tree that was verified in each step."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._spans, self._step = decode, Spans[tuple[int, int]](decode), 0

    def of(self, chunk: Chunk) -> dict[str, Any]:
        """`pieces` are texts, with the step and the place in it of the token that each came from."""
        step, draft = self._step, chunk.draft or Tree()
        self._step += bool(chunk.token_ids)
        marked = [(token, (step, place)) for place, token in enumerate(chunk.token_ids)]
        own = [(draft.origins or [])[node] for node in chunk.accepted]
        return {
            "step": step,
            "pieces": [[text, *(mark or (step, -1))] for text, mark in self._spans.cut(marked, chunk.text)],
            "tokens": [self._decode([t]) for t in chunk.token_ids],
            "origins": [*own, *[None] * (len(chunk.token_ids) - len(own))],
            "draft": {
                "tokens": [self._decode([t]) for t in draft.tokens],
                "parents": draft.parents,
                "origins": draft.origins or [],
                "accepted": chunk.accepted,
            },
        }


def _called(reason: str | None) -> str | None:
    """Why an answer with calls ended, as OpenAI says it; the log is told, too."""
    if reason != "stop":
        return reason
    account().calls_tools()
    return "tool_calls"


def _in_order(stats: Mapping[int, Stats]) -> list[Stats]:
    return [stats[i] for i in sorted(stats)]


def _is_chat(order: Order) -> bool:
    return isinstance(order.asked, ChatAsked)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Content that comes in parts becomes one text; parts that are no text cannot be read here."""
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise BadInput("Each message needs a role: system, user, assistant or tool.")
    if message.get("tool_calls"):
        message = message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadInput(f"A message has a part of type {kind!r}; this model reads text alone.")
    return message | {"content": "".join(str(part.get("text", "")) for part in content)}


def _with_object(call: Any) -> Any:
    """Clients send back a call's arguments as text; templates write down objects."""
    try:
        function = call["function"]
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except (TypeError, KeyError, ValueError, RecursionError):
        return call


def usage(order: Order, stats: Sequence[Stats]) -> dict[str, Any]:
    prompt, answer = sum(map(len, order.prompts)), sum(s.tokens for s in stats)
    accepted = sum(s.accepted for s in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_prompt_tokens for s in stats[:: order.params.n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(s.drafted for s in stats) - accepted,
        },
    }


def metrics(stats: Sequence[Stats]) -> dict[str, Any]:
    """What speculation did for this answer."""
    total = Stats.total(stats)
    seconds = {
        name: sum(getattr(s, f"time_{name}") for s in stats)
        for name in ("queue", "draft", "target", "verify", "host", "policy")
    }
    drafters: dict[str, list[int]] = {}
    for s in stats:
        for name, (drafted, accepted) in s.by_drafter.items():
            own = drafters.setdefault(name, [0, 0])
            own[0], own[1] = own[0] + drafted, own[1] + accepted
    return {
        "speculative_decoding": {
            "drafts": total.drafts,
            "drafted": total.drafted,
            "accepted": total.accepted,
            "acceptance_rate": total.acceptance_rate,
            "block_efficiency": total.block_efficiency,
            "acceptance_by_position": total.acceptance_by_position,
            "wasted": total.wasted,
            "by_drafter": {name: {"drafted": d, "accepted": a} for name, (d, a) in drafters.items()},
            "speedup_estimate": total.speedup_estimate,
        },
        "seconds": seconds | {"first_token": min((s.time_to_first_token for s in stats), default=0.0)},
    }
