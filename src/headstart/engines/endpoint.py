"""Any server with OpenAI's API, one for each method: what it tells over HTTP, and its counters where it has some."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from headstart.bench.methods import Method
from headstart.bench.records import Counts, Result
from headstart.bench.run import Answer, Ask, Plan
from headstart.bench.workloads import Prompt
from headstart.engines import counters
from headstart.errors import BadInput, RequestFailed

PATIENCE = 600.0  # seconds without a byte
PLAIN = {"speculative": {"enabled": False}}  # as a Headstart server is told


class Elsewhere:
    """What all engines have in common that compute in another process."""

    def margin(self, prompt: Prompt, before: Sequence[int], a: int, b: int) -> None:
        """Servers tell texts: what their tokens were is not known."""
        return None

    def roofline(self, result: Result) -> None:
        """Nobody here knows what it computes on."""
        return None


class EndpointEngine(Elsewhere):
    """`urls` are servers by method. With one URL for all, the server has to be Headstart's, which is told with each request."""

    name = "openai"

    def __init__(self, urls: Mapping[str, str], model: str | None = None, key: str | None = None) -> None:
        self.urls, self.model, self.key = dict(urls), model, key

    @contextmanager
    def open(self, methods: Sequence[Method], plan: Plan) -> Iterator[dict[str, EndpointSession]]:
        sessions = {}
        for method in methods:
            url = self.urls.get(method.name)
            if url is None:
                raise BadInput(f"No server was given for {method.name!r}: --engine openai:{method.name}=URL.")
            shared = sum(other == url for other in self.urls.values()) > 1
            sessions[method.name] = EndpointSession(
                url, self._headers(), self.model, told(method) if shared else {}, counted=not shared
            )
        for session in sessions.values():
            session.greet()
        yield sessions

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def told(method: Method) -> dict[str, Any]:
    """What a Headstart server is asked for with each request."""
    if not method.config:
        return PLAIN
    own = {"method": method.config.get("method"), "max_tokens": method.tokens}
    return {"speculative": {name: value for name, value in own.items() if value is not None and value != "auto"}}


@dataclass
class EndpointSession:
    url: str  # with or without /v1
    headers: Mapping[str, str]
    model: str | None
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of each request
    counted: bool = True  # its counters are of this method alone
    about: dict[str, Any] = field(default_factory=dict)
    forgets: bool = False  # without being told to

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def greet(self) -> None:
        """Say what is wrong before anything is measured, and find out the model's name."""
        try:
            got = httpx.get(f"{self.base}/v1/models", headers=dict(self.headers), timeout=PATIENCE)
            got.raise_for_status()
            names = [str(one["id"]) for one in got.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{self.base} is no server with OpenAI's API: {error}.") from error
        if self.model is None:
            self.model = names[0] if names else ""
        self.about |= {"url": self.base, "model": self.model}
        if (version := self._version()) is not None:
            self.about["version"] = version

    def _version(self) -> str | None:
        """vLLM tells it by itself, llama.cpp with everything else."""
        for path, name in (("/version", "version"), ("/props", "build_info")):
            try:
                got = httpx.get(f"{self.base}{path}", headers=dict(self.headers), timeout=PATIENCE)
                return str(got.json()[name])
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                continue
        return None

    def forget(self) -> None:
        """vLLM can be told to; others keep what they have, and reports say so."""
        if self.forgets:
            self.about["forgets"] = True
            return
        try:
            got = httpx.post(f"{self.base}/reset_prefix_cache", headers=dict(self.headers), timeout=PATIENCE)
            self.about["forgets"] = got.status_code == 200
        except httpx.HTTPError:
            self.about["forgets"] = False

    def counts(self) -> Counts | None:
        if not self.counted:
            return None
        try:
            got = httpx.get(f"{self.base}/metrics", headers=dict(self.headers), timeout=PATIENCE)
        except httpx.HTTPError:
            return None
        return counters.read(got.text) if got.status_code == 200 else None

    async def answer(self, prompt: Prompt, ask: Ask) -> Answer:
        path, body = self._request(prompt, ask)
        heard, began = Heard(), time.perf_counter()
        try:
            async with (
                httpx.AsyncClient(base_url=self.base, headers=dict(self.headers), timeout=PATIENCE) as client,
                client.stream("POST", path, json=body) as response,
            ):
                if response.status_code != 200:
                    raise RequestFailed(f"{self.base} answers {response.status_code}: {await _why(response)}")
                async for event in _events(response):
                    heard.add(event, time.perf_counter() - began)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{self.base} broke off: {error!r}.") from error
        return heard.answer()

    def _request(self, prompt: Prompt, ask: Ask) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": ask.max_tokens, "temperature": ask.temperature, "seed": ask.seed, "stream": True,
            "stream_options": {"include_usage": True}, **self.more,
        }  # fmt: skip
        if ask.ignore_eos:
            body["ignore_eos"] = True
        content = prompt.content
        if isinstance(content, str) or (content and isinstance(content[0], int)):
            return "/v1/completions", body | {"prompt": content if isinstance(content, str) else list(content)}
        return "/v1/chat/completions", body | {"messages": [dict(m) for m in content]}  # type: ignore[arg-type]


@dataclass
class Heard:
    """One answer while its events come in."""

    text: str = ""
    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)  # llama.cpp's

    def add(self, event: Mapping[str, Any], seconds: float) -> None:
        if "error" in event:
            raise RequestFailed(str(event["error"]))
        self.usage, self.timings = event.get("usage") or self.usage, event.get("timings") or self.timings
        for choice in event.get("choices") or []:
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if piece:
                self.text += piece
                self.pieces += 1
                self.last = seconds
                self.first = seconds if self.first is None else self.first

    def answer(self) -> Answer:
        """A server that does not count its tokens is taken to send one with each event."""
        if self.first is None:
            raise RequestFailed("The answer was empty.")
        tokens = int(self.usage.get("completion_tokens") or self.pieces)
        counts = Counts(drafted=self.timings.get("draft_n"), accepted=self.timings.get("draft_n_accepted"))
        return Answer(
            self.text, int(self.usage.get("prompt_tokens") or 0), tokens, self.last, self.first, counts=counts
        )


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError as error:
            raise RequestFailed(f"An event is no JSON: {data[:80]!r}.") from error
        if isinstance(event, dict):
            yield event


async def _why(response: httpx.Response) -> str:
    return (await response.aread()).decode(errors="replace")[:300]
