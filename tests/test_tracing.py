"""Spans: one for each request that asked for text, in the caller's trace where there is one."""

from __future__ import annotations

import ast
import functools
import http.server
import inspect
import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headstart import LLM
from headstart.errors import BadInput, ConfigError
from headstart.server import tracing
from headstart.server.answers import Answers
from headstart.server.app import create_app
from headstart.server.logs import Account, written
from headstart.server.tracing import Tracing
from tests import tiny, web
from tests.test_server import MESSAGES, PROMPT, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny.loaded(), speculative={"method": "ngram"}, max_num_seqs=4) as made:
        yield made


@contextmanager
def traced(llm: LLM) -> Iterator[tuple[str, InMemorySpanExporter]]:
    """The URL of a server, and its spans, which are all there when it has gone."""
    spans = InMemorySpanExporter()
    make = functools.partial(create_app, tracing=Tracing("tiny", SimpleSpanProcessor(spans)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.test_server.create_app", make)
        with serving(llm) as url:
            yield url, spans


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_span_says_what_the_answer_says(llm, chat: bool, stream: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"max_tokens": 20, "temperature": 0, "n": 2, "structured_outputs": {"regex": "(ab){8}"}, "stream": stream}
    body |= {"messages": MESSAGES} if chat else {"prompt": PROMPT * 2}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    with traced(llm) as (url, spans):
        got = web.post(url + path, json=body)
        web.get(f"{url}/v1/models")
    events = [line.removeprefix("data: ") for line in got.text.splitlines() if line.startswith("data: {")]
    told = json.loads(events[-1]) if stream else got.json()
    [span] = spans.get_finished_spans()
    found = dict(span.attributes)
    assert (span.name, span.kind, span.parent) == ("chat" if chat else "completion", SpanKind.SERVER, None)
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert span.end_time - span.start_time == int(found["gen_ai.latency.e2e"] * 1e9)
    assert found["gen_ai.operation.name"] == ("chat" if chat else "text_completion")
    assert (found["gen_ai.request.model"], found["gen_ai.response.id"]) == ("tiny", told["id"])
    assert found["gen_ai.usage.input_tokens"] == told["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == told["usage"]["completion_tokens"]
    assert len(found["gen_ai.response.finish_reasons"]) == 2
    details = told["usage"]["completion_tokens_details"]
    assert found["headstart.accepted"] == details["accepted_prediction_tokens"] <= found["headstart.drafted"]
    assert found["http.response.status_code"] == 200 and span.status.status_code is StatusCode.UNSET
    assert "lazy dog" not in span.to_json()
    assert span.resource.attributes["service.name"] == "headstart"


def test_the_callers_trace_goes_on(llm) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    with traced(llm) as (url, spans):
        for head in (f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", "nonsense"):
            assert web.post(f"{url}/v1/completions", json=body, headers={"traceparent": head}).status_code == 200
    within, alone = spans.get_finished_spans()  # the second caller did not want one
    assert f"{within.context.trace_id:032x}" == TRACE and f"{within.parent.span_id:016x}" == PARENT
    assert alone.parent is None and alone.context.trace_id != within.context.trace_id


def test_the_log_names_the_trace(llm) -> None:
    log = io.StringIO()
    with written("info", "json", log), traced(llm) as (url, _):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        web.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=headers)
    assert json.loads(log.getvalue())["trace_id"] == TRACE


def test_refusals_are_the_callers_mistakes_and_breakage_is_ours(llm, monkeypatch) -> None:
    async def broken(self, order):
        raise RuntimeError

    with traced(llm) as (url, spans):
        web.post(f"{url}/v1/completions", json={"prompt": PROMPT, "temperature": -1})
        monkeypatch.setattr(Answers, "whole", broken)
        web.post(f"{url}/v1/completions", json={"prompt": PROMPT})
    refused, broke = spans.get_finished_spans()
    assert refused.attributes["http.response.status_code"] == 400 and refused.status.status_code is StatusCode.UNSET
    assert broke.attributes["error.type"] == "500" and broke.status.status_code is StatusCode.ERROR


def test_a_collector_gets_them_at_the_end(monkeypatch) -> None:
    """Over HTTP, as it is set up by `--otlp-endpoint`; and under the name that the environment says."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-server")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        own = Tracing.to(f"http://127.0.0.1:{server.server_port}", "tiny")
        own(Account("cmpl-1", "POST", "/v1/completions", 200, prompt_tokens=3), {})
        own(Account("x", "POST", "/tokenize", 200), {})
        own.close()
        server.shutdown()
        thread.join(10)
    [(path, body)] = got
    [told] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces" and [s.name for s in told.scope_spans[0].spans] == ["completion"]
    assert "my-server" in [a.value.string_value for a in told.resource.attributes if a.key == "service.name"]


def test_addresses_of_collectors() -> None:
    for given in ("http://x:4318", "http://x:4318/", "http://x:4318/v1/traces"):
        assert tracing._url(given) == "http://x:4318/v1/traces"
    assert tracing._url("https://x/otlp") == "https://x/otlp/v1/traces"
    for given in ("localhost:4318", "grpc://x:4317", "http://", "http://[::1"):
        with pytest.raises(BadInput, match="is no address"):
            Tracing.to(given, "tiny")


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch, missing: str) -> None:
    for name in [n for n in sys.modules if n.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install 'headstart\[otel\]'\.$"):
        Tracing.to("http://localhost:4318", "tiny")


def test_nothing_of_it_is_imported_unless_it_is_used() -> None:
    top = ast.parse(inspect.getsource(tracing)).body
    named = [n.module or "" for n in top if isinstance(n, ast.ImportFrom)]
    named += [a.name for n in top if isinstance(n, ast.Import) for a in n.names]
    assert named and not [name for name in named if name.startswith("opentelemetry")]
