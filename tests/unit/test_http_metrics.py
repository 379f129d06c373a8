# SPDX-License-Identifier: Apache-2.0
"""The counts of HTTP requests: what each request to a whole server adds to /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blink.api.endpoints import ENDPOINTS
from blink.api.observe.http_metrics import _ROUTES
from blink.config import FrontendConfig
from blink.errors import OverloadedError
from blink.text.assets import ModelAssets, load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL

CONFIG = FrontendConfig(model=MODEL, region="test-http-metrics", api_key=("key",))
HEADERS = {"Authorization": "Bearer key"}
BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture
def server(assets: ModelAssets, tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(CONFIG, assets, tmp_path)
    yield server
    server.close()


def counts(server: FakeServer) -> dict[tuple[str, str, str], float]:
    """Return the requests by method, handler and status."""
    text = server.send("GET", "/metrics").text
    lines = re.findall(r'^http_requests_total\{handler="(.*)",method="(.*)",status="(.*)"\} (\S+)$', text, re.MULTILINE)
    return {(method, handler, status): float(value) for handler, method, status, value in lines if float(value)}


def test_every_endpoint_is_a_handler() -> None:
    paths = {path for endpoint in ENDPOINTS.values() for path in endpoint.paths}
    assert paths <= {handler for method, handler in _ROUTES if method == "POST"}


def test_a_server_that_nobody_asked_counts_nothing(server: FakeServer) -> None:
    assert server.send("GET", "/health").status_code == 200
    assert counts(server) == {}
    assert "http_request_duration_seconds" not in server.send("GET", "/metrics").text


def test_each_request_is_counted_by_its_method_handler_and_status(server: FakeServer) -> None:
    for stream in (False, True):
        assert server.post("/v1/completions", BODY | {"stream": stream}, headers=HEADERS).status_code == 200
    assert server.post("/v1/completions", BODY | {"n": 0}, headers=HEADERS).status_code == 400
    assert server.post("/v1/completions", BODY).status_code == 401
    server.engine.refusal = OverloadedError("Full.")
    assert (
        server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, headers=HEADERS
        ).status_code
        == 503
    )
    for path in ("/v1/models/a/b", "/v1/responses/x", "/nowhere", "/v1/completions"):
        server.send("GET", path, headers=HEADERS)
    server.send("DELETE", "/v1/responses/x", headers=HEADERS)
    server.send("POST", "/v1/responses/x/cancel", headers=HEADERS)
    server.send("PATCH", "/v1/completions", headers=HEADERS)
    response = "/v1/responses/{response_id}"
    assert counts(server) == {
        ("POST", "/v1/completions", "2xx"): 2,
        ("POST", "/v1/completions", "4xx"): 2,
        ("POST", "/v1/chat/completions", "5xx"): 1,
        ("GET", "/v1/models/{model_id}", "4xx"): 1,
        ("GET", response, "4xx"): 1,
        ("GET", "none", "4xx"): 2,
        ("DELETE", response, "4xx"): 1,
        ("POST", f"{response}/cancel", "4xx"): 1,
        ("other", "none", "4xx"): 1,
    }


def test_durations_are_a_histogram(server: FakeServer) -> None:
    metrics = server.service.poller.metrics
    for seconds in (0.05, 0.1, 0.3, 2.0):
        metrics.count_http("POST", "/v1/completions", 200, seconds)
    text = server.send("GET", "/metrics").text
    name = "http_request_duration_seconds"
    found = re.findall(
        rf'^{name}_(\w+)\{{handler="/v1/completions"(?:,le="(.*?)")?,method="POST"\}} (\S+)$', text, re.MULTILINE
    )
    assert [(kind, bound, float(value)) for kind, bound, value in found] == [
        ("bucket", "0.1", 2.0),
        ("bucket", "0.5", 3.0),
        ("bucket", "1.0", 3.0),
        ("bucket", "+Inf", 4.0),
        ("count", "", 4.0),
        ("sum", "", pytest.approx(2.45)),
    ]


def test_an_open_server_counts_too(assets: ModelAssets, tmp_path: Path) -> None:
    server = FakeServer(replace(CONFIG, api_key=()), assets, tmp_path)
    server.post("/tokenize", {"prompt": "Hi"})
    assert counts(server) == {("POST", "/tokenize", "2xx"): 1}
    server.close()
