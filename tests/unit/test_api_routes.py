# SPDX-License-Identifier: Apache-2.0
"""The API of a worker whose engine is not there, through ASGI: statuses, errors, keys, limits, CORS."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from blink import __version__
from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics
from blink.api.pages.docs import render_docs
from blink.api.routes import create_app
from blink.api.server import add_middleware
from blink.api.service import ApiService
from blink.api.serving.poller import Poller
from blink.config import FrontendConfig, ModelConfig
from blink.link.client import EngineClient
from blink.link.group import EngineGroup
from blink.link.shm import ShmConnector
from blink.text.assets import load_assets
from small_tokenizer import MODEL, write_hollow_gguf

CONFIG = FrontendConfig(
    model=MODEL,
    region="test-no-engine",
    api_key=("secret", "schlüssel"),
    max_body_bytes=1000,
    allowed_origins=("https://a.example",),
    enable_request_id_headers=True,
)
KEY = {"Authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    client = EngineClient(ShmConnector(CONFIG.region), 1.0)
    client.tick()
    store = MetricStore(CONFIG.region, NUM_VALUES, tmp_path_factory.mktemp("metrics"))
    service = ApiService(CONFIG, load_assets(CONFIG), Poller(EngineGroup([client]), Metrics(store, [client.stats]), 0))
    yield add_middleware(create_app(service), CONFIG)
    client.close()
    store.close()


@pytest.mark.parametrize("variable", ["BLINK_API_KEY", "VLLM_API_KEY"])
def test_a_key_in_the_environment_locks_the_server(app: Any, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del app
    monkeypatch.setenv(variable, "from outside")
    locked = add_middleware(FastAPI(), FrontendConfig())
    assert send(locked, "GET", "/v1/models").status_code == 401
    assert send(locked, "GET", "/v1/models", headers={"Authorization": "Bearer from outside"}).status_code == 404


def send(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/models"])
def test_without_an_engine_readiness_is_503_with_the_reason(app: Any, path: str) -> None:
    response = send(app, "GET", path, headers=KEY)
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
    assert "the engine is not running or still starting" in error["message"]
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False])
def test_without_an_engine_requests_are_503(app: Any, stream: bool) -> None:
    response = send(app, "POST", "/v1/chat/completions", json={**CHAT, "stream": stream}, headers=KEY)
    assert response.status_code == 503
    assert 'reason="engine_unavailable"' in send(app, "GET", "/metrics").text


def test_metrics_are_read_alone_and_their_faults_are_answered(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send(app, "HEAD", "/metrics").headers["content-type"] == send(app, "GET", "/metrics").headers["content-type"]
    assert send(app, "POST", "/metrics", headers=KEY).status_code == 405
    monkeypatch.setattr(Metrics, "render", lambda _: 1 // 0)
    assert send(app, "GET", "/metrics").json()["error"]["code"] == 500


def test_the_page_is_there_without_an_engine_or_a_key(app: Any) -> None:
    assert "<title>Blink</title>" in send(app, "GET", "/").text
    assert send(app, "GET", "/page/chat.js").status_code == 200


def test_the_prefix_cache_is_emptied_with_a_key_and_an_engine_only(app: Any) -> None:
    assert send(app, "POST", "/reset_prefix_cache").status_code == 401
    assert send(app, "POST", "/reset_prefix_cache", headers=KEY).status_code == 503


def test_what_needs_no_engine_answers_without_one(app: Any) -> None:
    assert send(app, "GET", "/version").json() == {"version": __version__}
    assert send(app, "GET", "/load").json() == {"server_load": 0}
    assert "/v1/chat/completions" in send(app, "GET", "/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "secret",
        "Basic secret",
        "Bearer",
        "Bearer wrong",
        "Bearer secret2",
        "Bearer s\xe9cret".encode("latin-1"),
    ],
)
def test_v1_needs_a_key(app: Any, header: str | bytes | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    response = send(app, "GET", "/v1/models", headers=headers)
    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})


@pytest.mark.parametrize("header", ["Bearer secret", "bearer secret", "Bearer schlüssel".encode()])
def test_every_key_opens_v1(app: Any, header: str | bytes) -> None:
    assert send(app, "GET", "/v1/models", headers={"Authorization": header}).status_code == 503


def test_other_paths_and_options_need_no_key(app: Any) -> None:
    assert send(app, "GET", "/version").status_code == 200
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = send(app, "OPTIONS", "/v1/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = send(app, "OPTIONS", "/v1/completions", headers={**preflight, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers


async def _chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 100


@pytest.mark.parametrize("content", [b" " * 1001, 11])
def test_large_bodies_are_413_known_or_counted(app: Any, content: bytes | int) -> None:
    body = _chunks(content) if isinstance(content, int) else content
    response = send(app, "POST", "/v1/completions", content=body, headers=KEY)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"prompt": 1}', b'{"prompt": "x", "max_tokens": "many"}', b"[" * 900],
)
def test_malformed_bodies_are_400_in_the_apis_form(app: Any, content: bytes) -> None:
    response = send(app, "POST", "/v1/completions", content=content, headers=KEY)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_bug_is_500_in_the_apis_form(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ApiService, "answer", fail)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=CHAT, headers=KEY)

    response = asyncio.run(run())
    assert (response.status_code, response.json()["error"]["message"]) == (500, "Internal error: ZeroDivisionError.")


def host_statuses(config: FrontendConfig, hosts: Sequence[str], path: str = "/version") -> list[int]:
    """What a server with this configuration answers under each name."""
    app = add_middleware(FastAPI(), config)
    return [send(app, "GET", path, headers=[("Host", host)]).status_code for host in hosts]


_SERVED = 404  # by an application without routes
OWN = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000", "localhost."]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "192.0.2.1",
    "[2001:db8::1]",
]
FOREIGN += ["", ":8000", "evil.example@localhost", "localhost, evil.example", "localhost evil.example"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "::1", "localhost"])
def test_on_a_loopback_address_only_its_own_names_are_served(host: str) -> None:
    named = f"[{host}]:80" if ":" in host else f"{host}:80"
    assert host_statuses(FrontendConfig(host=host), [*OWN, named]) == [_SERVED] * (len(OWN) + 1)
    assert host_statuses(FrontendConfig(host=host), FOREIGN) == [421] * len(FOREIGN)


def test_names_that_are_allowed_are_served_and_others_are_not() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):  # with names given, other addresses are checked too
        config = FrontendConfig(host=host, allowed_hosts=("Model.Example", "192.0.2.1"))
        assert host_statuses(config, [*OWN, "model.example:443", "192.0.2.1"]) == [_SERVED] * (len(OWN) + 2)
        assert host_statuses(config, ["evil.example", "a.model.example"]) == [421] * 2


@pytest.mark.parametrize(
    "config",
    [
        FrontendConfig(host="0.0.0.0"),
        FrontendConfig(host="::"),
        FrontendConfig(uds="/tmp/x.sock"),
        FrontendConfig(allowed_hosts=("*",)),
    ],
)
def test_elsewhere_any_name_is_served_unless_some_are_given(config: FrontendConfig) -> None:
    assert host_statuses(config, ["evil.example", "localhost", "pod-7.svc"]) == [_SERVED] * 3


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/docs", "/openapi.json", "/v1/models", "/tokenize"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_path_is_served_under_a_foreign_name(app: Any, method: str, path: str) -> None:
    refused = send(app, method, path, headers={**KEY, "Host": "rebound.example", "Origin": "http://rebound.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (421, 421)
    assert "--allowed-hosts" in refused.json()["error"]["message"]
    both = send(app, method, path, headers=[("Host", "localhost"), ("Host", "rebound.example")])
    assert both.status_code == 421


def test_a_request_that_names_no_host_is_served(app: Any) -> None:
    """As clients of HTTP/1.0 do, and no browser."""
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def note(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/version", "headers": [], "query_string": b""}
        await app(scope, receive, note)

    asyncio.run(run())
    assert sent[0]["status"] == 200


def test_every_page_is_bound_to_files_of_this_server(app: Any) -> None:
    pages = [path for path in ("/", "/docs", "/redoc", "/docs/oauth2-redirect") if is_page(send(app, "GET", path))]
    assert pages == ["/", "/docs"]
    policies = {send(app, "GET", path).headers["content-security-policy"] for path in (*pages, "/page/docs.css")}
    assert len(policies) == 1


def is_page(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/html")


def test_the_page_of_the_api_names_every_path_and_field_and_nothing_from_elsewhere(app: Any) -> None:
    page = send(app, "GET", "/docs")
    assert send(app, "HEAD", "/docs").headers["content-length"] == page.headers["content-length"]
    document = send(app, "GET", "/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    for body in (
        "CompletionBody",
        "ChatBody",
        "ResponsesBody",
        "TokenizeTextBody",
        "TokenizeChatBody",
        "DetokenizeBody",
    ):
        for field in document["components"]["schemas"][body]["properties"]:
            assert f"<code>{field}</code>" in page.text
    assert not re.search(r"<script|<style|\sstyle=|\son\w+=|https?://|//\w", page.text)
    linked = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    assert linked == {"page/docs.css", "page/icon.svg", "openapi.json"}
    assert all(send(app, "GET", f"/{path}").status_code == 200 for path in linked)


def test_names_in_the_page_of_the_api_are_text() -> None:
    fields = {"<b>": {"type": "array", "items": {"enum": ["<i>"]}, "default": "<u>"}}
    schemas = {"Body": {"properties": fields, "required": []}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    paths = {"/<a>": {"post": {"description": "<em>", "requestBody": {"content": content}}}}
    page = render_docs({"info": {"version": "<1>"}, "paths": paths, "components": {"schemas": schemas}})
    assert not re.search("<b>|<i>|<u>|<a>|<em>|<1>", page)
    assert "array of &quot;&lt;i&gt;&quot;" in page and "&lt;1&gt;" in page


def test_unknown_routes_and_methods_have_the_apis_form(app: Any) -> None:
    missing = send(app, "GET", "/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    wrong = send(app, "GET", "/v1/completions", headers=KEY)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)
    assert wrong.headers["allow"] == "POST"


def test_request_ids_come_back_or_are_made(app: Any) -> None:
    assert send(app, "GET", "/version", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    made = {send(app, "GET", "/version").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


@pytest.mark.parametrize("request_id", ["a\nb", "a\x1b[2J", "a\u2028b", "\ud800", "x" * 257, ""])
def test_request_ids_that_could_forge_a_log_are_400(app: Any, request_id: str) -> None:
    body = json.dumps({**CHAT, "request_id": request_id})
    response = send(app, "POST", "/v1/chat/completions", content=body, headers=KEY)
    assert (response.status_code, b"request_id" in response.content or b"JSON" in response.content) == (400, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 503),
        ({"Content-Type": "application/json; charset=utf-8"}, 503),
        ({"Content-Type": "text/plain"}, 400),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ({"Origin": "https://b.example"}, 400),
        ({"Origin": "https://b.example", "Content-Type": "text/plain"}, 400),
        ({"Origin": "https://b.example", "Content-Type": "application/json"}, 503),  # a browser has asked before
        ({"Origin": "https://a.example"}, 503),
    ],
)
def test_only_json_is_served_and_nothing_unasked_to_a_foreign_page(
    app: Any, headers: dict[str, str], status: int
) -> None:
    response = send(app, "POST", "/v1/chat/completions", content=json.dumps(CHAT), headers={**KEY, **headers})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_templates_assets_and_flags(tmp_path: Path, kind: str) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}|{{ eos_token }}")
    model = MODEL
    if kind == "gguf":
        model = ModelConfig(model=str(tmp_path / "model.gguf"))
        write_hollow_gguf(Path(model.model))
    assets = load_assets(FrontendConfig(model=model, chat_template=str(template)))
    assert assets.chat_template is not None
    assert assets.chat_template.render(CHAT["messages"]) == "hi|<|im_end|>"
    assert assets.eos_token_ids == (2,)
