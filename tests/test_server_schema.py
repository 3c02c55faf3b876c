"""The server against its own OpenAPI document: schemathesis asks what the document allows and what it does not, and reads
every answer. It runs as the command that it is, against a real socket, and asks the same each time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart import LLM
from headstart.server.openapi import EVENTS, EXAMPLES, HELLO, JSON, LIMITS, ROUTES
from headstart.server.protocol import ChatAsked, CompletionAsked, DetokenizeAsked
from tests import tiny, web
from tests.test_server import serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
SMALL: dict[str, Any] = dict(max_queue=4, max_output_tokens=4)  # whatever is asked for takes no longer than this
OF_THE_PROMPT = ("prompt_logprobs", "echo")  # not with streams
COMPUTE = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny.with_tools("<tool_call>"), speculative={"method": "ngram"}, max_num_seqs=8) as made:
        yield made


# ------------------------------------------------------------------ the document, sharpened
def closed(part: Any) -> Any:
    """The same schema, in which objects have the properties that it names and no others."""
    if isinstance(part, list):
        return [closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    own = {"additionalProperties": False} if "properties" in part and "additionalProperties" not in part else {}
    return {name: closed(value) for name, value in part.items()} | own


def event_of(chunk: dict[str, Any]) -> dict[str, Any]:
    """An event as schemathesis reads it: its data are a chunk, written as JSON, or the mark at the end."""
    written = {"contentMediaType": JSON, "contentSchema": chunk}
    return {"type": "object", "properties": {"data": {"if": {"not": {"const": "[DONE]"}}, "then": written}}}


def sharpened(told: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The document of the server, where an answer with a field that it does not name is a mistake. Fields that go with
    streams alone, or with none, would make most requests bad ones: so all of them are streams or none is."""
    told["components"] = closed(told["components"])
    for path in COMPUTE:
        events = told["paths"][path]["post"]["responses"]["200"]["content"][EVENTS]
        events["schema"] = event_of(events["schema"])
    for name in ("CompletionAsked", "ChatAsked"):
        asked = told["components"]["schemas"][name]
        asked["required"] += ["stream"]
        asked["properties"]["stream"] = {"const": stream}
        if name == "ChatAsked":
            asked["required"] += ["logprobs"]
            asked["properties"]["logprobs"] = {"const": True}  # top_logprobs need it
        if not stream:
            del asked["properties"]["stream_options"], asked["properties"]["show_drafts"]
        for other in OF_THE_PROMPT if stream else ():
            asked["properties"].pop(other, None)
    return told


# ------------------------------------------------------------------ running it
def schemathesis(folder: Path, url: str, *more: str, stream: bool = False) -> Counter[tuple[str, int, str]]:
    """Show what it finds, if anything; else how often each (path, status, media type) was the answer."""
    path, har = folder / "openapi.json", folder / "seen.har"
    told = web.get(f"{url}/openapi.json").json()
    path.write_text(json.dumps(sharpened(told, stream)))
    how = [f"--checks={','.join(CHECKS)}", f"--request-timeout={web.PATIENCE}", f"--report-har-path={har}"]
    how += ["--generation-deterministic", "--no-shrink", "--no-color", "--warnings=off", *more]
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), f"--url={url}", *how]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads(har.read_text())["log"]["entries"]
    return Counter(_seen(e["request"]["url"].removeprefix(url), e["response"]) for e in entries)


def _seen(path: str, response: dict[str, Any]) -> tuple[str, int, str]:
    kind = next((h["value"] for h in response["headers"] if h["name"].lower() == "content-type"), "")
    return path, response["status"], kind.split(";")[0]


def test_answers_are_as_the_document_says(llm, tmp_path) -> None:
    with serving(llm, **SMALL) as url:
        seen = schemathesis(tmp_path, url, "--max-examples=8", "--phases=examples,coverage,fuzzing")
    assert all(seen[path, 200, next(iter(says.content))] for path, says in ROUTES.items()), "each one was read"
    assert min(seen[path, status, JSON] for path in COMPUTE for status in (200, 400)) > 50, "and not just refusals"
    llm.engine.check_integrity()


def test_events_are_as_the_document_says(llm, tmp_path) -> None:
    how = ("--max-examples=16", "--phases=fuzzing", "--mode=positive", "--include-path-regex=completions")
    with serving(llm, **SMALL) as url:
        seen = schemathesis(tmp_path, url, *how, stream=True)
    assert min(seen[path, 200, EVENTS] for path in COMPUTE) > 3, seen
    llm.engine.check_integrity()


# ------------------------------------------------------------------ the document itself
def test_the_document_names_every_route_and_every_field_that_it_limits(llm) -> None:
    with serving(llm, **SMALL) as url:
        told = web.get(f"{url}/openapi.json").json()
    assert told["paths"].keys() == ROUTES.keys() and EXAMPLES.keys() <= ROUTES.keys()
    fields = {name for asked in (CompletionAsked, ChatAsked, DetokenizeAsked) for name in asked.model_fields}
    assert fields >= LIMITS.keys(), "a field was renamed"
    assert all("422" not in o["responses"] for path in told["paths"].values() for o in path.values())


def test_keys_are_needed_where_the_document_says(llm) -> None:
    with serving(llm, keys=["secret"], **SMALL) as url, httpx.Client(base_url=url, timeout=web.PATIENCE) as client:
        told = client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
        for path, operations in told["paths"].items():
            for method, operation in operations.items():
                answer = client.request(method, path, json=None if method == "get" else {})
                assert ("security" in operation) == ("401" in operation["responses"]) == (answer.status_code == 401)
                if answer.status_code == 401:
                    assert answer.headers["www-authenticate"] == "Bearer" and "key" in answer.json()["error"]["message"]
    assert told["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}


def test_examples_of_the_document_work(llm) -> None:
    with serving(llm, **SMALL) as url, httpx.Client(base_url=url, timeout=web.PATIENCE) as client:
        for path, examples in EXAMPLES.items():
            for name, body in examples.items():
                assert client.post(path, json=body).status_code == 200, name


def test_what_is_beyond_a_limit_is_refused(llm) -> None:
    step = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0}
    wrong = [(name, limit[k] + step[k]) for name, limit in LIMITS.items() for k in step.keys() & limit.keys()]
    assert len(wrong) > 15
    with serving(llm, **SMALL) as url, httpx.Client(base_url=url, timeout=web.PATIENCE) as client:
        for name, value in wrong:
            chat = name not in CompletionAsked.model_fields
            body = {"messages": HELLO, "logprobs": True} if chat else {"prompt": "Hello"}
            assert client.post(COMPUTE[chat], json=body | {name: value}).status_code == 400, (name, value)
