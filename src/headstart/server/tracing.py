"""OpenTelemetry, for who wants it: one span for each request that asked for text, after the GenAI conventions.

Nothing of it is imported, and nothing is done for it, unless `--otlp-endpoint` names a collector. A span is written when its
request has ended, from its account, with the times that were noted on the way; nothing of prompts and answers is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headstart.errors import BadInput, ConfigError
from headstart.server.logs import Account
from headstart.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

SPANS = {  # by route: the span's name, and how the conventions call what is done
    "/v1/chat/completions": ("chat", "chat"),
    "/v1/completions": ("completion", "text_completion"),
}
PATH = "/v1/traces"


class Tracing:
    """Spans on their way to whatever this processor hands them to."""

    def __init__(self, model: str, processor: SpanProcessor) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = {"service.name": "headstart", "service.version": VERSION}
        told = OTELResourceDetector().detect().attributes  # by OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        self._provider = TracerProvider(resource=Resource.create({**own, **told}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headstart", VERSION)
        self._api, self._callers, self._model = trace, TraceContextTextMapPropagator(), model

    @classmethod
    def to(cls, endpoint: str, model: str) -> Tracing:
        """To a collector that speaks OTLP over HTTP."""
        url = _url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs {error.name}: pip install 'headstart[otel]'.") from error
        return cls(model, BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))

    def __call__(self, account: Account, headers: Mapping[str, str]) -> None:
        """The span of a request that has ended. Its parent is the caller's, where the caller names one."""
        if account.route not in SPANS:
            return
        name, operation = SPANS[account.route]
        caller = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        span = self._tracer.start_span(
            name,
            context=self._callers.extract(caller),
            kind=self._api.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": self._model,
                **_attributes(account),
            },
            start_time=account.arrived,
        )
        account.trace_id = f"{span.get_span_context().trace_id:032x}"
        if account.status is not None and account.status >= 500:
            span.set_attribute("error.type", str(account.status))
            span.set_status(self._api.StatusCode.ERROR)
        span.end(account.arrived + int(account.seconds * 1e9))

    def close(self) -> None:
        """What is still here is sent."""
        self._provider.shutdown()


def _attributes(account: Account) -> dict[str, Any]:
    out: dict[str, Any] = {
        "gen_ai.provider.name": "headstart",
        "gen_ai.response.id": account.id,
        "http.response.status_code": account.status,
    }
    if account.prompt_tokens is not None:
        out |= {
            "gen_ai.usage.input_tokens": account.prompt_tokens,
            "gen_ai.usage.output_tokens": account.completion_tokens,
            "gen_ai.response.finish_reasons": account.finish_reasons,
            "gen_ai.latency.time_to_first_token": account.seconds_to_first_token,  # the latencies are vLLM's names
            "gen_ai.latency.e2e": account.seconds,
            "headstart.drafted": account.drafted,
            "headstart.accepted": account.accepted,
        }
    return {key: value for key, value in out.items() if value is not None}


def _url(endpoint: str) -> str:
    """Collectors are named by their address; what they take spans at is always the same."""
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # brackets that do not close
        known = False
    if not known:
        raise BadInput(f"--otlp-endpoint {endpoint!r} is no address: write it like http://localhost:4318.")
    return endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
