# SPDX-License-Identifier: Apache-2.0
"""Connections that hold back, pile up or ask for all: others are served beside them."""

from __future__ import annotations

import json
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from processes import MAX_SEQUENCES, Engine, Frontend, answers, resident_mib, start_frontend, stop, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
_PATIENCE = 300.0  # seconds; reached only by failures
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_MAX_CONNECTIONS = 12
_FLAGS = ["--skip-tokenizer-init", "--body-timeout=1", f"--max-bodies-bytes={1 << 20}"]
_KEYS = ["--api-key=a", "--api-key=b", "--api-key=c", "--max-client-share=0.5"]


@pytest.fixture(scope="module")
def frontend(tiny_engine: Engine) -> Iterator[Frontend]:
    """A frontend with tight limits that takes token ids."""
    frontend = start_frontend(tiny_engine.region, *_FLAGS, *_KEYS, f"--max-connections={_MAX_CONNECTIONS}", wait=False)
    wait_for(lambda: _status(frontend) == 200, _PATIENCE)
    yield frontend
    stop(frontend.process)


def _status(frontend: Frontend) -> int:
    try:
        return httpx.get(f"{frontend.url}/health", trust_env=False).status_code
    except httpx.TransportError:
        return 0


def ask(frontend: Frontend, key: str, **body: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    fields = {"prompt": [5, 6, 7], "max_tokens": 3, **body}
    return httpx.post(f"{frontend.url}/v1/completions", json=fields, headers=headers, timeout=60, trust_env=False)


def connect(frontend: Frontend) -> socket.socket:
    return socket.create_connection(("127.0.0.1", frontend.port), timeout=_PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_body_that_does_not_come_is_408_and_the_connection_closed(frontend: Frontend) -> None:
    with connect(frontend) as connection:
        connection.sendall(_HEAD + b'Authorization: Bearer a\r\nContent-Length: 100\r\n\r\n{"prompt"')
        started = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started > 0.9


def test_a_refused_request_does_not_send_its_body_for_ever(frontend: Frontend) -> None:
    with connect(frontend) as connection:
        connection.sendall(_HEAD + b"Content-Length: 100000\r\n\r\n{")
        assert read_all(connection).startswith(b"HTTP/1.1 401")


def test_large_bodies_on_their_way_do_not_keep_small_ones_out(frontend: Frontend) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(frontend)) for _ in range(5)]
        for connection in connections:
            connection.sendall(_HEAD + b"Authorization: Bearer a\r\nContent-Length: 600000\r\n\r\n" + b" " * 500_000)
        assert ask(frontend, "b").status_code == 200
        # The budget has room for two of them: the others are ended at once, not after their time of 31 s.
        started = time.monotonic()
        wait_for(lambda: len(select.select(connections, [], [], 1.0)[0]) >= 3, _PATIENCE)
        assert time.monotonic() - started < 25


def test_connections_beyond_the_limit_are_refused_until_others_go(frontend: Frontend) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(frontend)) for _ in range(2 * _MAX_CONNECTIONS)]
        assert read_all(connections[-1]).startswith(b"HTTP/1.1 503")
    wait_for(lambda: _status(frontend) == 200, _PATIENCE)


@pytest.mark.parametrize("part", [b"X-Trailer: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_trailers_end_somewhere(frontend: Frontend, part: bytes) -> None:
    with connect(frontend) as connection:
        head = _HEAD + b"Authorization: Bearer a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        try:
            connection.sendall(head + (b"" if b":" in part else b"X-Trailer: "))
            for _ in range(20_000):
                connection.sendall(part)
        except OSError:
            return  # it was closed
        raise AssertionError("20 MB of trailers were taken")


def test_pipelined_requests_wait_outside_and_all_are_answered(frontend: Frontend) -> None:
    number, get = 1000, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(frontend) as connection:
        connection.sendall(get * (number - 1))
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200") == number


def test_a_connection_that_pipelines_bodies_takes_little_memory(frontend: Frontend) -> None:
    request = _HEAD + b"Authorization: Bearer a\r\n"
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "user": "x" * 400_000}).encode()
    request += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    before = resident_mib(frontend.process.pid)
    with connect(frontend) as connection:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):  # it takes no more
            for _ in range(200):
                connection.sendall(request)
        assert resident_mib(frontend.process.pid) - before < 40
        assert ask(frontend, "b").status_code == 200


def test_one_client_takes_its_share_only(frontend: Frontend) -> None:
    # Client "a" may still have what the tests before have left.
    wait_for(lambda: httpx.get(f"{frontend.url}/load", trust_env=False).json()["server_load"] == 0, _PATIENCE)
    half = MAX_SEQUENCES // 2
    endless = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "n": half, "stream": True}
    headers = {"Authorization": "Bearer c"}
    url = f"{frontend.url}/v1/completions"
    with httpx.stream("POST", url, json=endless, headers=headers, timeout=60, trust_env=False) as held:
        assert held.status_code == 200
        refused = ask(frontend, "c")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "TooManyRequestsError"
        assert ask(frontend, "b", n=half // 2).status_code == 200
        metrics = httpx.get(f"{frontend.url}/metrics", trust_env=False).text
        assert 'reason="client_limit"' in metrics
    wait_for(lambda: ask(frontend, "c").status_code == 200, _PATIENCE)
    too_many = ask(frontend, "c", prompt=[[5]] * 2, n=half)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")


@pytest.mark.long
def test_half_a_tls_handshake_is_closed_within_seconds(tiny_engine: Engine, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    flags = [f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", "--skip-tokenizer-init"]
    frontend = start_frontend(tiny_engine.region, *flags, wait=False, verify=False)
    try:
        wait_for(lambda: answers(frontend) == 200, _PATIENCE)
        with connect(frontend) as connection:
            started = time.monotonic()
            connection.sendall(b"\x16\x03\x01")
            assert read_all(connection) == b""
            assert 3 < time.monotonic() - started < 30
    finally:
        stop(frontend.process)
