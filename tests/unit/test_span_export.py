# SPDX-License-Identifier: Apache-2.0
"""Spans on their way to a collector: the same as OpenTelemetry's encoder makes them, by its exporter's rules."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from blink.api.observe import span_export
from blink.api.observe.span_export import SpanEncoder, can_prepare
from blink.api.observe.tracing import RequestTracer, connect_tracer
from blink.request.table import OpenSequence
from blink.sampling_params import SamplingParams
from otlp_receiver import Receiver

_REASONS = "gen_ai.response.finish_reasons"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0{}"


class Request:
    """A request whose times are in the past."""

    def __init__(self) -> None:
        self.arrived = time.perf_counter() - 3
        self.flow = 0


def end_one(
    tracer: RequestTracer, headers: Mapping[str, str] | None = None, reason: str = "length", **times: Any
) -> None:
    """Let a request of one sequence begin and end; `times` are those of the sequence."""
    request = Request()
    params = SamplingParams(temperature=0.5, max_tokens=None if reason == "abort" else 9)
    tracer.begin(request, headers or {}, "cmpl-mine", "tiny", params)
    opened = OpenSequence(request, SimpleNamespace(num_tokens=7, cached_tokens=16), 20)  # pyright: ignore
    for name, seconds in times.items():
        setattr(opened, name, request.arrived + seconds)
    tracer.end(request, opened, reason)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def spans_of_all_kinds() -> list[ReadableSpan]:
    """What the tracer makes of sequences that differ in all that spans can differ in."""
    kept = InMemorySpanExporter()
    tracer = RequestTracer(kept)
    heads = [{}, {"traceparent": PARENT.format(1)}, {"traceparent": PARENT.format(1), "tracestate": "a=1,b=x y"}]
    times = [{}, {"admitted": 0.5}, {"admitted": 0.5, "first": 1.25}]
    for head, reason, when in product(heads, ("stop", "length", "abort", "error"), times):
        end_one(tracer, head, reason, **when)
    tracer.close()
    return [*kept.get_finished_spans()]


def other_spans(limits: SpanLimits) -> list[ReadableSpan]:
    """Spans of another program, under limits, with values that ours do not have."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "other"}), span_limits=limits)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("other", "2")
    for value in (True, False, 3, -3, 2**62, 0.5, "text" * 9, (1, 2), ("a", "b"), (1,), (True,), (1.0,), 7, (1, 2)):
        tracer.start_span("other", attributes={"first": "x", "value": value, "last": 1.5}).end()
    return [*kept.get_finished_spans()]


def test_spans_are_encoded_as_the_library_does_it() -> None:
    encoder = SpanEncoder()
    ours = spans_of_all_kinds()
    assert len(ours) == 36
    for spans in (ours, ours[::-1], other_spans(SpanLimits()), other_spans(SpanLimits(max_span_attributes=2)), ours):
        assert encoder.encode(spans) == encode_spans(spans).SerializeToString()
    mixed = ours + other_spans(SpanLimits(max_span_attribute_length=3))
    assert encoder.encode(mixed) == encode_spans(mixed).SerializeToString()


def test_only_a_sequence_that_failed_is_an_error_to_a_collector() -> None:
    found = {(span.attributes or {})[_REASONS]: span.status.status_code for span in spans_of_all_kinds()}
    assert found == {
        ("stop",): StatusCode.UNSET,
        ("length",): StatusCode.UNSET,
        ("abort",): StatusCode.UNSET,  # its client has gone
        ("error",): StatusCode.ERROR,
    }


def test_forms_of_spans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "_MAX_FORMS", 3)
    encoder, ours = SpanEncoder(), spans_of_all_kinds()
    for _ in range(2):
        assert encoder.encode(ours) == encode_spans(ours).SerializeToString()
        assert len(encoder._forms) <= 3


def test_this_versions_exporter_takes_encoded_spans() -> None:
    assert can_prepare(OTLPSpanExporter(endpoint="http://127.0.0.1:9/v1/traces"))


@pytest.mark.parametrize("is_prepared", [True, False])
def test_spans_go_by_the_rules_of_the_librarys_exporter(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=here")
    if not is_prepared:  # a version whose exporter takes no bytes
        monkeypatch.setattr("blink.api.observe.tracing.can_prepare", lambda _: False)
    receiver.refusals.append(503)
    tracer = connect_tracer(receiver.url)
    for _ in range(3):
        end_one(tracer, {"traceparent": PARENT.format(1)}, admitted=0.1, first=0.2)
    tracer.close()
    assert len(receiver.heads) == 2 and len(receiver.spans) == 3  # refused, tried again
    assert all((head["x-tenant"], head["content-encoding"]) == ("blue", "gzip") for head in receiver.heads)
    assert receiver.resources[0]["host.name"] == "here"


@pytest.mark.parametrize(
    ("sampler", "headers", "expected"),
    [
        ("always_off", {}, 0),
        ("parentbased_always_off", {"traceparent": PARENT.format(1)}, 1),
        ("parentbased_always_on", {"traceparent": PARENT.format(0)}, 0),
        ("always_on", {"traceparent": PARENT.format(0)}, 1),
    ],
)
def test_the_sampler_and_the_clients_choice_decide(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, sampler: str, headers: dict[str, str], expected: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    tracer = connect_tracer(receiver.url)
    end_one(tracer, headers)
    tracer.close()
    assert len(receiver.spans) == expected


def test_a_collector_that_hangs_holds_up_nobody_and_gets_what_there_is_room_for(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "40")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    receiver.door.clear()
    tracer = connect_tracer(receiver.url)
    for _ in range(100):  # returns although nothing leaves
        end_one(tracer)
    assert not receiver.spans
    receiver.door.set()
    tracer.close()
    assert 40 <= len(receiver.spans) <= 50  # the queue, and a batch that had left it
