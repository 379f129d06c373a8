# SPDX-License-Identifier: Apache-2.0
"""A span for each sequence, sent by OpenTelemetry; loaded only with --otlp-traces-endpoint.

Sequences are handed over at their end; spans are made, and leave, in a thread of their own: no token waits for the
collector.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from typing import Final, Protocol, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from blink.api.observe.metrics import EngineMetrics
from blink.api.observe.sequence_metrics import SequenceMetrics
from blink.api.observe.span_export import PreparedExporter, can_prepare
from blink.api.observe.spans import Asked, Ended, SpanMaker
from blink.errors import ConfigError
from blink.request.table import OpenSequence
from blink.sampling_params import SamplingParams

_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_HTTP_PATH: Final = "/v1/traces"
_CARRIER: Final = ("traceparent", "tracestate")


class Request(Protocol):
    """The request behind some sequences."""

    arrived: float  # seconds, time.perf_counter


class RequestTracer:
    """Send the spans of one worker."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._queue = BatchSpanProcessor(SpanMaker(exporter))
        self._asked: WeakKeyDictionary[Request, Asked] = WeakKeyDictionary()
        atexit.register(self.close)

    def begin(
        self, request: Request, headers: Mapping[str, str], request_id: str, model: str, params: SamplingParams
    ) -> None:
        """Remember a request: its spans belong to the trace that its `traceparent` header names, if it has one."""
        carrier = {name: headers[name] for name in _CARRIER if name in headers}
        self._asked[request] = Asked(carrier, request_id, model, params)

    def end(self, request: Request, opened: OpenSequence, reason: str) -> None:
        """Send the span of a sequence that has ended now."""
        asked = self._asked.get(request)
        if asked is None:
            return
        now = time.perf_counter()
        generation = opened.generation
        ended = Ended(
            asked=asked,
            reason=reason,
            epoch_ns=time.time_ns() - round(now * 1e9),
            arrived=request.arrived,
            admitted=opened.admitted,
            first=opened.first,
            ended=now,
            num_prompt_tokens=opened.num_prompt_tokens,
            num_tokens=generation.num_tokens,
            num_cached_tokens=generation.cached_tokens,
        )
        self._queue.on_end(cast(ReadableSpan, ended))  # the queue passes it on as it is

    def close(self) -> None:
        """Send what is left."""
        atexit.unregister(self.close)
        self._queue.shutdown()


class TracedSequences(SequenceMetrics):
    """Observe the table of sequences, and tell the tracer of their ends."""

    def __init__(self, metrics: EngineMetrics, tracer: RequestTracer) -> None:
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
