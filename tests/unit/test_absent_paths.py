# SPDX-License-Identifier: Apache-2.0
"""Paths of other servers that are not here: each says why, and none hides a path that is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blink.api.endpoints import ENDPOINTS
from blink.api.openai import absent, lora_routes
from blink.config import FrontendConfig
from blink.text.assets import load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL

REASONS = {**absent.REASONS, **lora_routes.ELSEWHERE}
CONFIG = FrontendConfig(model=MODEL, region="test-absent")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    server = FakeServer(CONFIG, load_assets(CONFIG), tmp_path_factory.mktemp("absent"))
    yield server
    server.close()


@pytest.mark.parametrize("path", REASONS)
def test_an_absent_path_says_why(server: FakeServer, path: str) -> None:
    for method in ("GET", "POST"):
        response = server.send(method, path)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == REASONS[path]
    assert path not in server.send("GET", "/openapi.json").json()["paths"]


def test_no_absent_path_is_an_endpoints() -> None:
    assert not REASONS.keys() & {path for endpoint in ENDPOINTS.values() for path in endpoint.paths}


@pytest.mark.parametrize("named", ["/tokenize", "/reset_prefix_cache", "/server_info", "/v1/models", "/health"])
def test_what_a_reason_names_is_there(server: FakeServer, named: str) -> None:
    assert any(named in reason for reason in REASONS.values())
    assert {server.send(method, named).status_code for method in ("GET", "POST")} - {404, 405}
