# SPDX-License-Identifier: Apache-2.0
"""Where a server listens: its URL, whether the port is free, and whether the server there is ready."""

from __future__ import annotations

import errno
import http.client
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from blink.errors import ConfigError

_PROBE_TIMEOUT: Final = 1.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A listening address as configured: TCP, or a Unix socket when `uds` is set."""

    host: str
    port: int
    uds: str = ""
    tls: bool = False

    @property
    def url(self) -> str:
        """The URL under which a client on this host reaches the server."""
        host = _connectable(self.host)
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is a TCP address that only this host reaches.

        Raises:
            ConfigError: the host has no address.
        """
        return not self.uds and ipaddress.ip_address(self._resolve()[4][0].partition("%")[0]).is_loopback

    def reserve(self) -> socket.socket | None:
        """Check that nobody listens here, and hold the TCP port until the returned socket is closed.

        The socket never listens: it lets workers that set SO_REUSEPORT bind beside it, and nobody else.

        Raises:
            ConfigError: the address is in use, not this host's, or not permitted.
        """
        if self.uds:
            return None
        family, _, _, _, sockaddr = self._resolve()
        if self.port:
            # SO_REUSEPORT alone would share the port with another server of the same user.
            _bind(family, sockaddr, socket.SO_REUSEADDR).close()
        return _bind(family, sockaddr, socket.SO_REUSEPORT)

    def probe(self) -> bool:
        """Whether GET /health answers 200 within a second."""
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.uds:
            return _UnixConnection(self.uds)
        host = _connectable(self.host)
        if not self.tls:
            return http.client.HTTPConnection(host, self.port, timeout=_PROBE_TIMEOUT)
        # The probe only asks whether our own child is up; its certificate names a public host.
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(host, self.port, timeout=_PROBE_TIMEOUT, context=context)

    def _resolve(self) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except OSError as error:
            raise ConfigError(f"--host {self.host}: {error.strerror}") from error
        return found  # pyright: ignore[reportReturnType]  # IPv6 adds two items that bind() takes as they are


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_PROBE_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connectable(host: str) -> str:
    """Replace an any-address by the loopback address of its family."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _bind(family: socket.AddressFamily, sockaddr: tuple[str, int], option: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(sockaddr)
    except OSError as error:
        bound.close()
        host, port = sockaddr[:2]
        advice = {
            errno.EADDRINUSE: "is in use: stop the other server or choose another --port",
            errno.EACCES: "needs privileges: choose a --port of 1024 or more",
            errno.EADDRNOTAVAIL: "is not an address of this machine: choose another --host",
        }
        reason = advice.get(error.errno or 0, error.strerror)
        raise ConfigError(f"cannot listen: {host} port {port} {reason}") from error
    return bound
