# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that tests start."""

from __future__ import annotations

import secrets
import socket

# Below those that Linux gives to outgoing connections and to sockets without a wish (ip-sysctl, ip_local_port_range):
# one of those may have got the port before the server, which needs seconds to start, or minutes in an emulated machine.
_FIRST, _END = 10_000, 32_768


def free_port() -> int:
    """Return a port of the loopback device on which nothing listens."""
    while True:
        port = _FIRST + secrets.randbelow(_END - _FIRST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
