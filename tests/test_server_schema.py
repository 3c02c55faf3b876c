"""The server against its own OpenAPI document: schemathesis asks what the document allows and what it does not, and reads
every answer. It runs as the command that it is, against a real socket, and asks the same each time.
"""

from __future__ import annotations

import copy
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
from headstart.server.openapi import EVENTS, JSON, ROUTES
from tests import tiny
from tests.test_server import serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
SMALL: dict[str, Any] = dict(max_queue=4, max_output_tokens=4)  # whatever is asked for takes no longer than this
PATIENCE = 60  # seconds for one answer: who waits longer waits forever
COMPUTE = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = tiny.loaded()
    model.tokenizer.hf = copy.deepcopy(model.tokenizer.hf)
    model.tokenizer.hf.chat_template = "{% if tools %}<tool_call>{% endif %}" + tiny.TEMPLATE
    with LLM(model, speculative={"method": "ngram"}, max_num_seqs=8) as made:
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
    streams alone would make most requests bad ones, so either all of them are streams or none has such fields."""
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
    return told


# ------------------------------------------------------------------ running it
def schemathesis(folder: Path, url: str, *more: str, stream: bool = False, **headers: str) -> Counter:
    """Show what it finds, if anything; else how often each (path, status, media type) was the answer."""
    path, har = folder / "openapi.json", folder / "seen.har"
    told = httpx.get(f"{url}/openapi.json", headers=headers).json()
    path.write_text(json.dumps(sharpened(told, stream)))
    how = [f"--checks={','.join(CHECKS)}", f"--request-timeout={PATIENCE}", f"--report-har-path={har}"]
    how += ["--generation-deterministic", "--no-shrink", "--no-color", "--warnings=off", *more]
    how += [f"--header={name}: {value}" for name, value in headers.items()]
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), f"--url={url}", *how]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    (folder / "out.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads(har.read_text())["log"]["entries"]
    return Counter(_seen(e["request"]["url"].removeprefix(url), e["response"]) for e in entries)


def _seen(path: str, response: dict[str, Any]) -> tuple[str, int, str]:
    kind = next((h["value"] for h in response["headers"] if h["name"].lower() == "content-type"), "")
    return path, response["status"], kind.split(";")[0]


def test_answers_are_as_the_document_says(llm, tmp_path) -> None:
    with serving(llm, **SMALL) as url:
        seen = schemathesis(tmp_path, url, "--max-examples=25", "--phases=examples,coverage,fuzzing")
    assert all(seen[path, 200, next(iter(says.content))] for path, says in ROUTES.items()), "each one was read"
    assert min(seen[path, 200, JSON] for path in COMPUTE) > 50 and min(seen[path, 400, JSON] for path in COMPUTE) > 50
    llm.engine.check_integrity()


def test_events_are_as_the_document_says(llm, tmp_path) -> None:
    with serving(llm, **SMALL) as url:
        how = ("--max-examples=25", "--phases=coverage,fuzzing", "--include-path-regex=completions")
        seen = schemathesis(tmp_path, url, *how, stream=True)
    assert min(seen[path, 200, EVENTS] for path in COMPUTE) > 50, seen
    llm.engine.check_integrity()
