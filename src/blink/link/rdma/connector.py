# SPDX-License-Identifier: Apache-2.0
"""The way to an engine on another machine: set up over TCP in a thread, then one-sided RDMA only."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import numpy as np

from blink.config import RdmaConfig
from blink.errors import BlinkError, EngineUnavailableError
from blink.link.rdma.ends import RdmaChannel, open_channel, transport_over
from blink.link.rdma.handshake import TIMEOUT, Descriptor, LineChannel, backend_of, negotiate, parse_place, read_token
from blink.region.layout import CONSTANTS, CONTROL, HEADER
from blink.region.memory import QueuePairAddresses, check_header
from blink.region.transport import Transport

logger = logging.getLogger(__name__)

_MAX_DESCRIPTOR = 1 << 16  # bytes; the metadata of a NIXL agent grows with the machine's devices


class RdmaConnector:
    """The way to the engine whose control port is at HOST:PORT."""

    def __init__(self, place: str, config: RdmaConfig) -> None:
        """Check that this machine can do RDMA.

        Raises:
            ConfigError: no library, no device or no token.
        """
        self._place = parse_place(place, "--rdma")
        self._token = read_token(config)
        self._config = config
        open_channel(config).close()
        self._attempt: _Attempt | None = None
        self._last_error = ""

    def open(self) -> RdmaConnection | None:
        """Return a connection once an attempt has made one; the first call starts it.

        Raises:
            BlinkError: the attempt failed; the next call starts another.
        """
        if self._attempt is None:
            self._attempt = _Attempt(self._connect)
        if self._attempt.is_alive():
            return None
        attempt, self._attempt = self._attempt, None
        if attempt.error is not None:
            if attempt.error.message != self._last_error:
                logger.warning("no connection to the engine: %s", attempt.error.message)
            self._last_error = attempt.error.message
            raise attempt.error
        self._last_error = ""
        return attempt.connection

    def _connect(self) -> RdmaConnection:
        host, port = self._place
        channel = open_channel(self._config)
        try:
            with socket.create_connection(self._place, TIMEOUT) as control:
                lines = LineChannel(control, _MAX_DESCRIPTOR)
                descriptor = negotiate(lines, self._token, channel.info())
                connection = RdmaConnection(channel, descriptor)
                if backend_of(descriptor.endpoint) == "nixl":
                    lines.send({"connected": True})
            return connection
        except OSError as error:
            channel.close()
            raise EngineUnavailableError(
                f"the engine at {host}:{port} cannot be reached: {error.strerror or error}"
            ) from error
        except BaseException:
            channel.close()
            raise


class RdmaConnection:
    """A queue pair in another machine's memory."""

    def __init__(self, channel: RdmaChannel, descriptor: Descriptor) -> None:
        """Connect the channel, which is this object's from then on, and read the engine's header.

        Raises:
            ConfigError: no memory can be registered, or there is no path.
            EngineUnavailableError: nothing can be read, or the engine was restarted.
            LayoutMismatchError: engine and frontend are of different builds.
        """
        self._channel: Any = channel
        channel.connect(descriptor.endpoint, descriptor.shared, descriptor.pair)
        header = np.zeros(1, HEADER)
        if not channel.read(0, header):
            raise EngineUnavailableError(f"there is no RDMA path to the engine: {channel.failure()}")
        self.header = header[0]
        check_header(self.header)
        if int(self.header["epoch"]) != descriptor.epoch:
            raise EngineUnavailableError("the engine was restarted while this frontend connected")
        self.geometry = self.header["geometry"]
        self.addresses = QueuePairAddresses(self, descriptor.pair_index)
        self.transport: Transport = transport_over(channel)
        self._control = np.zeros(1, CONTROL)
        self.refresh()

    @property
    def channel(self) -> Any:
        """The RDMA connection itself."""
        return self._channel

    def refresh(self) -> None:
        """Read the control block: one RDMA READ."""
        self._channel.read(CONSTANTS["control_offset"], self._control)

    def control_word(self, field: str) -> int:
        return int(self._control[0][field])

    def heartbeat(self) -> int:
        return int(self._control[0]["heartbeat"])

    def statistics(self) -> Any:
        return self._control[0]["statistics"]

    def loss(self) -> str | None:
        failure = self._channel.failure()
        return f"the RDMA connection to the engine broke ({failure})" if failure else None

    def start_watch(self, head: int, event_fd: int, interval_us: int) -> None:
        entries = int(self.geometry["cq_entries"])
        self._channel.start(self.addresses.cq, entries, head, event_fd, interval_us)

    def watch(self, head: int, active: bool) -> None:
        del head  # the channel follows it by itself
        self._channel.watch(active)

    def close(self) -> None:
        self._channel.close()


class _Attempt(threading.Thread):
    """One attempt to connect, on a thread of its own: a host that is away answers late or never."""

    def __init__(self, connect: Any) -> None:
        super().__init__(name="rdma-connect", daemon=True)
        self._connect = connect
        self.connection: RdmaConnection | None = None
        self.error: BlinkError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.connection = self._connect()
        except BlinkError as error:
            self.error = error
        except Exception as error:
            logger.exception("connecting failed")
            self.error = BlinkError(f"connecting failed: {error}")
