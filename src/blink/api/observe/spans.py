# SPDX-License-Identifier: Apache-2.0
"""The span of a sequence, with vLLM's attributes: noted in a few microseconds at its end, made when there is time.

OpenTelemetry takes 20 µs to make one, three times as long where its code has left the caches: no token waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar, cast

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from blink import __version__
from blink.sampling_params import SamplingParams

_TURN: Final = 16  # items of work after which the event loop's thread may go on
_PAUSE: Final = 0.0005  # seconds; without it that thread waits for Python's lock until its limit of 5 ms
_NO_PARENT: Final = Context()

Value = str | int | float
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for, and the trace that it belongs to."""

    carrier: Mapping[str, str]  # headers that name the trace, if there is one
    request_id: str
    model: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that has ended. Times are seconds of time.perf_counter()."""

    context: ClassVar[SpanContext] = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))  # lets it pass a queue

    asked: Asked
    reason: str
    epoch_ns: int  # what makes nanoseconds since 1970 of a time
    arrived: float
    admitted: float | None
    first: float | None
    ended: float
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int


class SpanMaker(SpanExporter):
    """Stands before an exporter: takes sequences that have ended, and exports the spans that the sampler wants."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._made = _Made()
        name = os.environ.get("OTEL_SERVICE_NAME", "blink")
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("blink", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Make spans of these sequences and send them."""
        for sequence in paced(cast(Sequence[Ended], spans)):
            self._make(sequence)
        made = self._made.take()
        return self._exporter.export(made) if made else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back here."""
        return self._exporter.force_flush(timeout_millis)

    def _make(self, sequence: Ended) -> None:
        asked = sequence.asked
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(asked.carrier) if asked.carrier else _NO_PARENT,
            SpanKind.SERVER,
            {**_list_wishes(asked), **_measure(sequence), "gen_ai.response.finish_reasons": [sequence.reason]},
            start_time=sequence.epoch_ns + round(sequence.arrived * 1e9),
        )
        if sequence.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(sequence.epoch_ns + round(sequence.ended * 1e9))


class _Made(SpanProcessor):
    """Gathers the spans that a tracer has made."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


def paced(items: Sequence[Item]) -> Iterator[Item]:
    """Yield items of work for a thread that must not hold up another one."""
    for place, item in enumerate(items, 1):
        yield item
        if place % _TURN == 0:
            time.sleep(_PAUSE)


def _list_wishes(asked: Asked) -> dict[str, Value]:
    params = asked.params
    found: dict[str, Value | None] = {
        "gen_ai.request.id": asked.request_id,
        "gen_ai.response.model": asked.model,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}


def _measure(sequence: Ended) -> dict[str, Value]:
    """Return vLLM's attributes of a sequence, in seconds and tokens."""
    arrived, admitted, first, ended = sequence.arrived, sequence.admitted, sequence.first, sequence.ended
    found: dict[str, Value] = {
        "gen_ai.usage.prompt_tokens": sequence.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sequence.num_tokens,
        "gen_ai.usage.cached_tokens": sequence.num_cached_tokens,
        "gen_ai.latency.e2e": ended - arrived,
    }
    if admitted is not None:
        found["gen_ai.latency.time_in_queue"] = admitted - arrived
        found["gen_ai.latency.time_in_model_inference"] = ended - admitted
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - arrived
        found["gen_ai.latency.time_in_model_prefill"] = first - (admitted or arrived)
        found["gen_ai.latency.time_in_model_decode"] = ended - first
    return found
