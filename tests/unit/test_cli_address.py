# SPDX-License-Identifier: Apache-2.0
"""The port check and the health probe, against real sockets."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from blink.errors import ConfigError
from blink.host.address import Address


def _at(port: int, host: str = "127.0.0.1") -> Address:
    return Address(host=host, port=port)


@contextmanager
def _serving(status: int) -> Iterator[int]:
    """Serve one fixed status on a free port."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def _count_waiting(server: socket.socket) -> int:
    """Accept all connections that wait at a server."""
    server.setblocking(False)
    accepted = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            accepted += 1
    return accepted


def test_reserving_a_listening_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        _at(taken.getsockname()[1]).reserve()


def test_reserving_fails_even_where_the_listener_shares_its_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken,
        pytest.raises(ConfigError, match="in use"),
    ):
        _at(taken.getsockname()[1]).reserve()


def test_reserved_port_is_open_to_sharing_workers_and_closed_to_others() -> None:
    reserved = _at(0).reserve()
    assert reserved is not None
    with closing(reserved):
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        with (
            socket.create_server(address, reuse_port=True) as first,
            socket.create_server(address, reuse_port=True) as second,
        ):
            for _ in range(20):
                socket.create_connection(address, timeout=5).close()
            assert _count_waiting(first) + _count_waiting(second) == 20  # the reservation took none of them


def test_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host"):
        _at(0, "203.0.113.1").reserve()


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False)])
def test_probe_reports_readiness(status: int, ready: bool) -> None:
    with _serving(status) as port:
        assert _at(port).probe() is ready
        assert _at(port, "0.0.0.0").probe() is ready


def test_probe_of_a_silent_address_is_false(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not _at(bound.getsockname()[1]).probe()
    assert not Address(host="", port=0, uds=str(tmp_path / "none.sock")).probe()


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:80"),
        ("0.0.0.0", True, "https://127.0.0.1:80"),
        ("::", False, "http://[::1]:80"),
        ("example.org", False, "http://example.org:80"),
    ],
)
def test_url_is_one_that_a_local_client_can_use(host: str, tls: bool, url: str) -> None:
    assert Address(host=host, port=80, tls=tls).url == url
