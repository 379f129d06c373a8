# SPDX-License-Identifier: Apache-2.0
"""Request tracing by OpenTelemetry: what a real receiver gets over HTTP from a real frontend."""

from __future__ import annotations

import time

import pytest

from blink.errors import ConfigError
from otlp_receiver import Receiver, values_of
from processes import Engine, Frontend, start_frontend, stop, wait_for

pytestmark = pytest.mark.e2e
pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
from blink.api.observe.tracing import connect_tracer  # noqa: E402  (needs the extra too)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_each_sequence_is_a_span_of_its_clients_trace_and_none_is_lost_at_the_end(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds until spans leave
    receiver = Receiver()
    flags = ["--skip-tokenizer-init", f"--otlp-traces-endpoint={receiver.url}"]
    frontend = start_frontend(tiny_engine.region, *flags)
    try:
        check_spans(frontend, receiver)
        receiver.spans.clear()
        frontend.complete([1, 2, 3])
    finally:
        stop(frontend.process)
        receiver.close()
    assert len(receiver.spans) == 1
    assert any(receiver.spans[0].trace_id) and not receiver.spans[0].parent_span_id


def check_spans(frontend: Frontend, receiver: Receiver) -> None:
    """Send a request with a parent and judge what the receiver gets."""
    before = time.time_ns()
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 5, "n": 2, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    assert frontend.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    wait_for(lambda: len(receiver.spans) == 2, 300)
    for span in receiver.spans:
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
        assert before < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
        values = values_of(span.attributes)
        asked = {"id": "cmpl-mine", "n": 2, "temperature": 0.5, "top_p": 0.9, "max_tokens": 5}
        assert {name: values[f"gen_ai.request.{name}"] for name in asked} == asked
        assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == (4, 5)
        assert values["gen_ai.response.model"] == "tiny"
        times = {name: values[f"gen_ai.latency.{name}"] for name in ("e2e", "time_in_queue", "time_to_first_token")}
        parts = [values[f"gen_ai.latency.time_in_model_{part}"] for part in ("prefill", "decode", "inference")]
        assert 0 < times["time_in_queue"] <= times["time_to_first_token"] < times["e2e"]
        assert parts[0] + parts[1] == pytest.approx(parts[2])
        assert times["time_in_queue"] + parts[2] == pytest.approx(times["e2e"], abs=0.01)
        took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert took == pytest.approx(times["e2e"], abs=0.01)
    assert receiver.resources[0]["service.name"] == "blink"


@pytest.mark.long
def test_a_collector_that_is_away_costs_no_answer(tiny_engine: Engine) -> None:
    frontend = start_frontend(tiny_engine.region, "--skip-tokenizer-init", "--otlp-traces-endpoint=http://127.0.0.1:9")
    try:
        assert frontend.complete([1, 2, 3])["usage"]["completion_tokens"] > 0
    finally:
        frontend.process.kill()
        frontend.process.wait()


def test_an_endpoint_that_is_no_url_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match="localhost:4318: give a URL such as http://localhost:4318/v1/traces"):
        connect_tracer("localhost:4318")
