# SPDX-License-Identifier: Apache-2.0
"""The way to an engine on another machine: set up over TCP in a thread, then one-sided RDMA only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from blink.errors import BlinkError, EngineUnavailableError
from blink.link.rdma.ends import open_link
from blink.link.rdma.handshake import confirm, negotiate, parse_place, read_token
from blink.link.rdma.link import RdmaLink
from blink.link.rdma.message import Lines, connect
from blink.rdma_config import RdmaConfig

logger = logging.getLogger(__name__)

_MAX_DESCRIPTOR = 1 << 16  # bytes; the metadata of a NIXL agent grows with the machine's devices


class RdmaConnector:
    """The way to the engine whose control port is at HOST:PORT."""

    retry_seconds = 0.25

    def __init__(self, place: str, config: RdmaConfig) -> None:
        """Check that this machine can do RDMA.

        Raises:
            ConfigError: no library, no device or no token.
        """
        self._place = parse_place(place, "--rdma")
        self._token = read_token(config)
        self._config = config
        open_link(config).close()
        self._attempt: _Attempt | None = None
        self._last_error = ""

    def open(self) -> RdmaLink | None:
        """Return a link once an attempt has made one; the first call starts it.

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
        return attempt.link

    def _connect(self) -> RdmaLink:
        host, port = self._place
        link = open_link(self._config)
        try:
            with connect(self._place) as control:
                lines = Lines(control, _MAX_DESCRIPTOR)
                link.connect(negotiate(lines, self._token, link.backend, link.info()))
                confirm(lines)
            return link
        except OSError as error:
            link.close()
            raise EngineUnavailableError(
                f"the engine at {host}:{port} cannot be reached: {error.strerror or error}"
            ) from error
        except BaseException:
            link.close()
            raise


class _Attempt(threading.Thread):
    """One attempt to connect, on a thread of its own: a host that is away answers late or never."""

    def __init__(self, connect: Callable[[], RdmaLink]) -> None:
        super().__init__(name="rdma-connect", daemon=True)
        self._connect = connect
        self.link: RdmaLink | None = None
        self.error: BlinkError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.link = self._connect()
        except BlinkError as error:
            self.error = error
        except Exception as error:
            logger.exception("connecting failed")
            self.error = BlinkError(f"connecting failed: {error}")
