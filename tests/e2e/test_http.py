# SPDX-License-Identifier: Apache-2.0
"""HTTP as it comes over the wire: versions, framing, pipelining, malformed requests, disconnects, slow readers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from blink.text.tokenizer import Tokenizer
from processes import MAX_BODY_BYTES, Frontend, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
BODY: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
PATIENCE = 300.0  # seconds; reached only by failures
ABORTED = 'vllm:request_success_total{engine="0",finished_reason="abort"'


def request(body: dict[str, Any], version: str = "1.1", path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def connect(server: Frontend) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


class Reader:
    """Split responses off a connection by their framing."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def read(self) -> tuple[int, bytes]:
        status = int(self._file.readline().split()[1])
        headers: dict[str, str] = {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        if headers.get("transfer-encoding") == "chunked":
            return status, b"".join(self._chunks())
        return status, self._file.read(int(headers["content-length"]))

    def _chunks(self) -> Iterator[bytes]:
        while length := int(self._file.readline(), 16):
            yield self._file.read(length)
            assert self._file.readline() == b"\r\n"
        assert self._file.readline() == b"\r\n"


def text_of_events(body: bytes) -> str:
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])


def expected(server: Frontend) -> str:
    return server.post("/v1/completions", **BODY).json()["choices"][0]["text"]


def test_stream_headers_keep_proxies_from_gathering(server: Frontend) -> None:
    with server.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert text_of_events(response.read()) == expected(server)


def test_http_1_0_gets_no_chunks_and_an_end(server: Frontend) -> None:
    with connect(server) as connection:
        connection.sendall(request({**BODY, "stream": True}, version="1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert text_of_events(body) == expected(server)


def test_head_has_headers_and_no_body(server: Frontend) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
            b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        first, second, rest = read_all(connection).split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")
    assert rest == b""


def test_one_connection_serves_streams_and_wholes_in_turn(server: Frontend) -> None:
    whole = expected(server)
    with connect(server) as connection:
        reader = Reader(connection)
        for stream in (True, False, True):
            connection.sendall(request({**BODY, "stream": stream}))
            status, body = reader.read()
            assert status == 200
            text = text_of_events(body) if stream else json.loads(body)["choices"][0]["text"]
            assert text == whole


def test_pipelined_requests_are_answered_in_order(server: Frontend) -> None:
    streams = [True, False, True, True]
    with connect(server) as connection:
        connection.sendall(b"".join(request({**BODY, "stream": stream, "max_tokens": 3}) for stream in streams))
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reader = Reader(connection)
        bodies = [reader.read() for _ in range(5)]
    assert [status for status, _ in bodies] == [200] * 5
    texts = [
        text_of_events(body) if stream else json.loads(body)["choices"][0]["text"]
        for stream, (_, body) in zip(streams, bodies, strict=False)
    ]
    assert len(set(texts)) == 1
    assert "version" in json.loads(bodies[4][1])


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000,
        b"GET /health HTTP/1.1\r\nBad Header\r\n\r\n",
    ],
)
def test_malformed_http_is_400_and_closed(server: Frontend, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        assert read_all(connection).startswith(b"HTTP/1.1 400")
    assert server.http.get("/health").status_code == 200


def test_garbage_behind_a_request_does_not_end_up_in_its_response(server: Frontend) -> None:
    with connect(server) as connection:
        connection.sendall(request({**BODY, "stream": True, "max_tokens": 200, "ignore_eos": True}))
        connection.recv(10)
        connection.sendall(b"\x00\x01garbage\r\n\r\n")
        assert b"400" not in read_all(connection)
    server.wait_until_idle()


def test_large_bodies_are_413_and_the_connection_goes_on(server: Frontend) -> None:
    with connect(server) as connection:
        reader = Reader(connection)
        connection.sendall(request({"prompt": "x" * (MAX_BODY_BYTES + 1)}))
        status, body = reader.read()
        assert (status, json.loads(body)["error"]["code"]) == (413, 413)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            connection.sendall(b"%x\r\n%b\r\n" % (60_000, b" " * 60_000))
        connection.sendall(b"0\r\n\r\n")
        assert reader.read()[0] == 413
        connection.sendall(request(BODY))
        assert reader.read()[0] == 200


def test_expect_100_is_answered_before_the_body(server: Frontend) -> None:
    head, _, body = request(BODY).partition(b"\r\n\r\n")
    with connect(server) as connection:
        connection.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert Reader(connection).read()[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("rest", [b"", request(BODY) * 2, b"GET /health HTTP/1.1\r\n"])
def test_a_client_that_leaves_is_cancelled_at_once(server: Frontend, stream: bool, rest: bytes) -> None:
    before = server.metric(ABORTED)
    with connect(server) as connection:
        connection.sendall(request({**ENDLESS, "stream": stream, "n": 2}) + rest)
        wait_for(lambda: server.metric("vllm:num_requests_running") == 2, PATIENCE)
    wait_for(lambda: server.metric(ABORTED) == before + 2, PATIENCE)
    server.wait_until_idle()


def test_a_client_that_leaves_after_a_large_body_is_cancelled(server: Frontend) -> None:
    before = server.metric(ABORTED)
    with connect(server) as connection:
        connection.sendall(request({**ENDLESS, "user": "x" * 500_000}))
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, PATIENCE)
    wait_for(lambda: server.metric(ABORTED) == before + 1, PATIENCE)
    server.wait_until_idle()


def test_a_client_that_does_not_read_is_cancelled(tiny_server: Frontend, tokenizer: Tokenizer) -> None:
    """Make chunks large: the twenty longest tokens become the twenty likeliest, and each is spelt out in bytes."""
    longest = sorted(range(17, 49152), key=lambda token: len(tokenizer.token_bytes(token)))[-20:]
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "logit_bias": {str(token): 100 for token in longest},
        "logprobs": True,
        "top_logprobs": 20,
        "n": 24,
        "max_tokens": 900,
        "stream": True,
    }
    before = tiny_server.metric(ABORTED)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", tiny_server.port))
        connection.sendall(request(body, path="/v1/chat/completions"))
        wait_for(lambda: tiny_server.metric(ABORTED) == before + 24, 2 * PATIENCE)
    tiny_server.wait_until_idle()


@pytest.fixture(scope="module")
def impatient(region: str) -> Iterator[Frontend]:
    """A frontend that keeps silent connections for a second."""
    frontend = start_frontend(region, "--keep-alive-timeout=1")
    yield frontend
    stop(frontend.process)


def test_idle_connections_are_closed(impatient: Frontend) -> None:
    start = time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert time.monotonic() - start > 0.9


def test_two_streams_at_once_do_not_mix(server: Frontend) -> None:
    prompts = ["The capital of France is", "Water boils at"]
    singles = [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    with connect(server) as first, connect(server) as second:
        for connection, prompt in ((first, prompts[0]), (second, prompts[1])):
            connection.sendall(request({**BODY, "max_tokens": 8, "prompt": prompt, "stream": True}))
        assert [text_of_events(Reader(connection).read()[1]) for connection in (first, second)] == singles


def test_missing_content_type_means_json(server: Frontend) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=json.dumps(BODY), timeout=60, trust_env=False)
    assert response.status_code == 200


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_connection_that_sends_no_whole_head_is_closed(impatient: Frontend, head: bytes) -> None:
    started = time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(head)
        assert read_all(connection) == b""
    assert time.monotonic() - started > 0.9


def test_a_body_may_take_longer_than_a_head(impatient: Frontend) -> None:
    data = request(BODY)
    with connect(impatient) as connection:
        connection.sendall(data[:-5])
        time.sleep(1.5)  # longer than --keep-alive-timeout
        connection.sendall(data[-5:])
        assert Reader(connection).read()[0] == 200
