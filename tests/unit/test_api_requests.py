# SPDX-License-Identifier: Apache-2.0
"""A request between its body and the engine: whose it is, what it submits, how it is refused or ends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Scope

from blink.api.http.clients import flow_of, note_key, salt_of
from blink.config import FrontendConfig
from blink.errors import BlinkError, EngineUnavailableError, OverloadedError
from blink.text.assets import ModelAssets, load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL

KEYS = ("first", "second")
CONFIG = FrontendConfig(
    model=MODEL, region="test-requests", api_key=KEYS, enable_log_requests=True, max_client_share=0.5
)
COMPLETION: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
}


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture
def server(assets: ModelAssets, tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(CONFIG, assets, tmp_path)
    yield server
    server.close()


def header(key: str = "first") -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def scope_of(address: str, key: bytes | None = None) -> Scope:
    scope: Scope = {"type": "http", "client": (address, 5)}
    if key is not None:
        note_key(scope, key)
    return scope


def test_a_client_is_its_key_and_without_one_its_address() -> None:
    keyed = {(address, key): flow_of(scope_of(address, key)) for address in ("10.0.0.1", "::1") for key in (b"a", b"b")}
    assert keyed["10.0.0.1", b"a"] == keyed["::1", b"a"] != keyed["10.0.0.1", b"b"]
    assert flow_of(scope_of("10.0.0.1")) == flow_of(scope_of("10.0.0.1")) != flow_of(scope_of("10.0.0.2"))
    assert flow_of({"type": "http", "client": None}) > 0  # of a Unix socket


def test_keys_behind_one_address_are_submitted_as_clients_of_their_own(server: FakeServer) -> None:
    for key, address in (("first", "10.0.0.1"), ("second", "10.0.0.1"), ("first", "10.0.0.2")):
        assert server.post("/v1/completions", COMPLETION, address=address, headers=header(key)).status_code == 200
    first, second, again = [each.flow for each in server.engine.submitted]
    assert first == again != second


def test_salts_of_keys_are_apart_and_nobody_can_name_anothers() -> None:
    salts = {salt_of(scope_of("a", key), salt) for key in (b"\1", b"\2", b"\1\2") for salt in (None, "x", ":x", "02:x")}
    assert len(salts) == 12
    assert salt_of(scope_of("a"), None) is None and salt_of(scope_of("a"), "x") == "x"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("isolation", ["key", "none"])
def test_cached_prefixes_are_shared_by_requests_of_one_key(
    assets: ModelAssets, tmp_path: Path, path: str, isolation: str
) -> None:
    server = FakeServer(replace(CONFIG, prefix_cache_isolation=isolation), assets, tmp_path)
    for key in ("first", "second", "first"):
        for fields in ({}, {"cache_salt": "mine"}):
            assert server.post(path, BODIES[path] | fields, headers=header(key)).status_code == 200
    server.close()
    plain, salted, others, others_salted, again, again_salted = [
        each.origin.hash_root for each in server.engine.submitted
    ]
    assert (plain, salted) == (again, again_salted)
    assert plain != salted and others != others_salted
    assert (plain == others, salted == others_salted) == (isolation == "none",) * 2


def test_keys_are_apart_unless_the_operator_says_otherwise() -> None:
    assert FrontendConfig().prefix_cache_isolation == "key"


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 1}])
def test_the_logprobs_of_a_prompt_are_asked_for_once(
    server: FakeServer, num_choices: int, fields: dict[str, Any]
) -> None:
    body = COMPLETION | fields | {"n": num_choices, "prompt": ["one prompt", "and another"]}
    assert server.post("/v1/completions", body, headers=header()).status_code == 200
    asked = [each.params.native_values(0)["num_prompt_logprobs"] > 0 for each in server.engine.submitted]
    assert asked == ([True] + [False] * (num_choices - 1)) * 2


@pytest.mark.parametrize(
    ("refusal", "status", "reason"),
    [
        (OverloadedError("The queue is full."), 503, "queue_full"),
        (EngineUnavailableError("The engine goes."), 503, "engine_unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_the_engine_does_not_take_is_counted_by_its_reason(
    server: FakeServer, path: str, stream: bool, refusal: BlinkError, status: int, reason: str
) -> None:
    server.engine.refusal = refusal
    for _ in range(2):
        response = server.post(path, BODIES[path] | {"stream": stream}, headers=header())
        assert (response.status_code, response.json()["error"]["message"]) == (status, refusal.message)
    assert rejections(server) == {reason: 2}


def rejections(server: FakeServer) -> dict[str, int]:
    """How many requests were refused, by the reasons that occurred."""
    return counts_of(server, "admission_rejections_total", "reason")


def counts_of(server: FakeServer, metric: str, label: str) -> dict[str, int]:
    lines = [line for line in server.send("GET", "/metrics").text.splitlines() if f"{metric}{{" in line]
    counts = {line.partition(f'{label}="')[2].partition('"')[0]: int(float(line.rpartition(" ")[2])) for line in lines}
    return {value: count for value, count in counts.items() if count}


def test_a_client_beyond_its_share_is_counted(server: FakeServer) -> None:
    server.engine.is_silent = True

    async def send(key: str, num_choices: int) -> int:
        body = COMPLETION | {"n": num_choices}
        return (await server.send_soon("POST", "/v1/completions", json=body, headers=header(key))).status_code

    async def run() -> list[int]:
        kept = asyncio.create_task(send("first", 32))  # its half of the engine's sequences
        while len(server.engine.submitted) < 32:
            await asyncio.sleep(0)
        refused = await send("first", 1)
        server.engine.is_silent = False
        return [refused, await send("second", 1), await kept]

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [429, 200, 200]
    assert rejections(server) == {"client_limit": 1}


def test_bodies_that_find_no_room_are_counted(assets: ModelAssets, tmp_path: Path) -> None:
    server = FakeServer(replace(CONFIG, max_bodies_bytes=10_000), assets, tmp_path)
    response = server.post("/v1/completions", {"prompt": "a" * 20_000}, headers=header())
    assert response.status_code == 503 and rejections(server) == {"queue_full": 1}
    server.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        *(("POST", path, body) for path, body in BODIES.items()),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
    ],
)
def test_each_endpoint_says_why_no_engine_is_there(server: FakeServer, method: str, path: str, body: Any) -> None:
    server.engine.ready, server.engine.unavailable_reason = False, "the engine is on holiday"
    response = server.send(method, path, json=body, headers=header())
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "Not available: the engine is on holiday."
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_while_its_answer_is_made_is_499_and_no_error(
    server: FakeServer, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.engine.is_silent = True

    async def leave() -> int:
        sent = asyncio.create_task(
            server.send_soon("POST", path, json=BODIES[path] | {"stream": stream}, headers=header())
        )
        while (gone := server.writer.leave) is None:
            await asyncio.sleep(0)
        gone()
        return (await sent).status_code

    status = asyncio.run(asyncio.wait_for(leave(), 30))
    assert status == (200 if stream else 499)  # a stream had begun
    assert server.engine.cancelled == [1]
    check_left(caplog)
    assert counts_of(server, "request_success_total", "finished_reason") == {"abort": 1}
    ended = [record.__dict__["fields"] for record in caplog.records if "request_id" in getattr(record, "fields", {})]
    assert [(fields["status"], fields["error"]) for fields in ended] == [(499, None)]


def check_left(caplog: pytest.LogCaptureFixture) -> None:
    """Judge the log of a request whose client left."""
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert not re.search(r"\b500\b|refused", caplog.text)
    for record in caplog.records:
        fields = getattr(record, "fields", {})
        assert fields.get("error") is None and fields.get("status", 499) == 499


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
def test_a_client_that_leaves_in_its_body_is_499_and_no_error(
    server: FakeServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"prompt": "He', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer first"), (b"content-type", b"application/json")]
    scope = {**scope_of("10.0.0.1"), "method": "POST", "path": path, "headers": headers, "query_string": b""}

    async def run() -> None:
        await server.app(scope, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 499
    assert json.loads(sent[1]["body"])["error"]["code"] == 499
    check_left(caplog)
