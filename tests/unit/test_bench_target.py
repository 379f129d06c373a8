# SPDX-License-Identifier: Apache-2.0
"""What `blink bench` learns from a server before it loads it, and what it says when that is no such server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from blink.bench.config import ServerConfig
from blink.bench.target import Target
from blink.errors import BlinkError, ConfigError, EngineUnavailableError


class Models(ThreadingHTTPServer):
    """Answers any GET with one body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body: Any = {"data": [{"id": "first", "max_model_len": 99}, {"id": "second"}]}
        self.status = 200
        self.authorization = ""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Models)
        server.authorization = self.headers.get("Authorization", "")
        body = json.dumps(server.body).encode()
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def models() -> Iterator[Models]:
    with Models() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _target(models: Models, **options: Any) -> Target:
    return Target(ServerConfig(port=models.server_port, **options))


def test_first_model_and_its_limit_are_taken(models: Models) -> None:
    target = _target(models)
    assert (target.model, target.max_model_len) == ("first", 99)


def test_model_that_is_named_is_taken(models: Models) -> None:
    assert (_target(models, model="second").model, _target(models, model="other").max_model_len) == ("second", 0)


def test_key_is_sent_with_every_request(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"Authorization: Bearer k1\r\n" in _target(models, api_key="k1").request_head(1)
    assert models.authorization == "Bearer k1"
    monkeypatch.setenv("BLINK_API_KEY", "k2")
    assert b"Authorization: Bearer k2\r\n" in _target(models).request_head(1)


def test_names_are_looked_up_once(models: Models) -> None:
    target = Target(ServerConfig(base_url=f"http://localhost:{models.server_port}/"))
    assert target.endpoint.host == "localhost"
    assert target.resolved().host in ("127.0.0.1", "::1")
    assert f"Host: localhost:{models.server_port}\r\n".encode() in target.request_head(1)


@pytest.mark.parametrize("body", [{"data": []}, {"models": []}, [], {"data": [{}]}, "x"])
def test_server_without_models_is_refused(models: Models, body: Any) -> None:
    models.body = body
    with pytest.raises(BlinkError, match="model"):
        _target(models)


def test_refusal_is_shown_with_its_message(models: Models) -> None:
    models.status, models.body = 401, {"error": "Unauthorized"}
    with pytest.raises(BlinkError, match="answers 401: Unauthorized"):
        _target(models)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a/v1", "http://[a"])
def test_wrong_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        Target(ServerConfig(base_url=url))


def test_nobody_there_is_said() -> None:
    with pytest.raises(EngineUnavailableError, match="no server at"):
        Target(ServerConfig(port=1))


def test_requests_get_the_time_asked_for(models: Models) -> None:
    assert _target(models, request_timeout=7).endpoint.timeout == 7
