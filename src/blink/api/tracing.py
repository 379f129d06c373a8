# SPDX-License-Identifier: Apache-2.0
"""A span for each sequence, with vLLM's attributes, sent by OpenTelemetry; loaded only with --otlp-traces-endpoint.

Spans are handed over at a sequence's end and leave from a thread of their own: no token waits for the collector.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from blink import __version__
from blink.api.metrics import Metrics
from blink.api.sequence_metrics import SequenceMetrics
from blink.api.span_export import PreparedExporter, can_prepare
from blink.errors import ConfigError
from blink.request.table import OpenSequence
from blink.sampling_params import SamplingParams

_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_HTTP_PATH: Final = "/v1/traces"
_TRACE_HEADER: Final = "traceparent"
_NO_PARENT: Final = Context()

Value = str | int | float


class Request(Protocol):
    """The request behind some sequences."""

    arrived: float  # seconds, time.perf_counter


@dataclass(frozen=True, slots=True)
class _Begun:
    parent: Context
    attributes: Mapping[str, Value]


class RequestTracer:
    """Send the spans of one worker."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: _service_name()}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("blink", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._begun: WeakKeyDictionary[Request, _Begun] = WeakKeyDictionary()

    def begin(
        self, request: Request, headers: Mapping[str, str], request_id: str, model: str, params: SamplingParams
    ) -> None:
        """Remember a request: its spans belong to the trace that its `traceparent` header names, if it has one."""
        asked: dict[str, Value | None] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
        }
        known = {name: value for name, value in asked.items() if value is not None}
        parent = self._propagator.extract(dict(headers)) if _TRACE_HEADER in headers else _NO_PARENT
        self._begun[request] = _Begun(parent, known)

    def end(self, request: Request, opened: OpenSequence, reason: str) -> None:
        """Send the span of a sequence that has ended now."""
        begun = self._begun.get(request)
        if begun is None:
            return
        now = time.perf_counter()
        epoch_ns = time.time_ns() - round(now * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            begun.parent,
            SpanKind.SERVER,
            {**begun.attributes, **_measure(request, opened, now), "gen_ai.response.finish_reasons": [reason]},
            start_time=epoch_ns + round(request.arrived * 1e9),
        )
        if reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(epoch_ns + round(now * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class TracedSequences(SequenceMetrics):
    """Observe the table of sequences, and tell the tracer of their ends."""

    def __init__(self, metrics: Metrics, tracer: RequestTracer) -> None:
        super().__init__(metrics)
        self._tracer = tracer

    def note_end(self, opened: OpenSequence, reason: str) -> None:
        """Count the sequence and send its span."""
        super().note_end(opened, reason)
        self._tracer.end(opened.owner, opened, reason)


def connect_tracer(endpoint: str) -> RequestTracer:
    """Return a tracer that sends to a collector: by HTTP, or gRPC if OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so.

    Raises:
        ConfigError: the endpoint is no URL, or the protocol is unknown or not installed.
    """
    if urlsplit(endpoint).scheme not in ("http", "https", "grpc"):
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: give a URL such as http://localhost:4318{_HTTP_PATH}")
    protocol = os.environ.get(_PROTOCOL, "http/protobuf")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        has_path = urlsplit(endpoint).path not in ("", "/")
        exporter = OTLPSpanExporter(endpoint=endpoint if has_path else endpoint.rstrip("/") + _HTTP_PATH)
        return RequestTracer(PreparedExporter(exporter) if can_prepare(exporter) else exporter)
    if protocol != "grpc":
        raise ConfigError(f"{_PROTOCOL} is {protocol!r}; make it http/protobuf or grpc")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # pyright: ignore[reportMissingImports]
            OTLPSpanExporter as GrpcExporter,
        )
    except ModuleNotFoundError as error:
        raise ConfigError("gRPC needs pip install opentelemetry-exporter-otlp-proto-grpc") from error
    return RequestTracer(GrpcExporter(endpoint=endpoint, insecure=urlsplit(endpoint).scheme != "https"))


def _service_name() -> str:
    return os.environ.get("OTEL_SERVICE_NAME", "blink")


def _measure(request: Request, opened: OpenSequence, now: float) -> dict[str, Value]:
    """Return vLLM's attributes of a sequence that ends at `now`, in seconds and tokens."""
    found: dict[str, Value] = {
        "gen_ai.usage.prompt_tokens": opened.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": opened.generation.num_tokens,
        "gen_ai.usage.cached_tokens": opened.generation.cached_tokens,
        "gen_ai.latency.e2e": now - request.arrived,
    }
    if opened.admitted is not None:
        found["gen_ai.latency.time_in_queue"] = opened.admitted - request.arrived
        found["gen_ai.latency.time_in_model_inference"] = now - opened.admitted
    if opened.first is not None:
        found["gen_ai.latency.time_to_first_token"] = opened.first - request.arrived
        found["gen_ai.latency.time_in_model_prefill"] = opened.first - (opened.admitted or request.arrived)
        found["gen_ai.latency.time_in_model_decode"] = now - opened.first
    return found
