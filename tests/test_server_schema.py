"""The server against its own OpenAPI document: schemathesis asks what the document allows and what it does not, and reads
every answer. It runs as the command that it is, against a real socket, with the same requests each time.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart import LLM
from headstart.server.openapi import ROUTES
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
PATIENCE = 60  # seconds for one answer: whoever waits longer waits forever


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = tiny.loaded()
    model.tokenizer.hf = copy.deepcopy(model.tokenizer.hf)
    model.tokenizer.hf.chat_template = "{% if tools %}<tool_call>{% endif %}" + tiny.TEMPLATE
    with LLM(model, speculative={"method": "ngram"}, max_num_seqs=8) as made:
        yield made


def closed(part: Any) -> Any:
    """The same schema, in which objects have the properties that it names and no others."""
    if isinstance(part, list):
        return [closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    own = {"additionalProperties": False} if "properties" in part and "additionalProperties" not in part else {}
    return {name: closed(value) for name, value in part.items()} | own


def document(url: str, **headers: str) -> dict[str, Any]:
    """As the server tells it; but an answer with a field that it does not name is a mistake here."""
    told = httpx.get(f"{url}/openapi.json", headers=headers).json()
    return told | {"components": closed(told["components"])}


def schemathesis(folder: Path, url: str, *more: str, **headers: str) -> None:
    """Run it, and show what it says where it finds anything."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document(url, **headers)))
    how = ("--generation-deterministic", "--seed=1", "--no-shrink", "--no-color")
    said = [f"--header={name}: {value}" for name, value in headers.items()]
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), f"--url={url}", *how, *said, *more]
    command += [f"--checks={','.join(CHECKS)}", f"--request-timeout={PATIENCE}", "--warnings=off"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout[-20000:])
    assert done.returncode == 0, done.stdout + done.stderr


def test_answers_are_as_the_document_says(llm, tmp_path) -> None:
    with serving(llm, **SMALL) as url:
        schemathesis(tmp_path, url, "--max-examples=25", "--phases=examples,coverage,fuzzing")
        assert 0
