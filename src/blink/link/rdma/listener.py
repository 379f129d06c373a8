# SPDX-License-Identifier: Apache-2.0
"""Lets frontends on other machines in: a TCP port, used while a connection is set up and never after.

Each connection has a thread and a deadline of its own. When too many are being set up, the oldest that has not shown
the token is dropped.

Each frontend gets a queue pair of the region, and an RDMA connection in a protection domain of its own. The domain's
keys open that queue pair's memory for reading and writing, and the region's head for reading. Then the network card
serves it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from blink.config import EngineConfig
from blink.errors import BlinkError, ConfigError
from blink.link.rdma.ends import EngineEnd, open_engine_end, open_link
from blink.link.rdma.handshake import Descriptor, admit, parse_place, read_token
from blink.link.rdma.message import Lines, Message, RemoteMemory
from blink.link.shm import ShmConnector, ShmLink
from blink.region.layout import CONSTANTS, CONTROL

logger = logging.getLogger("blink.engine")

_ATTACH_GRACE = 5.0  # seconds that a new peer has to attach its queue pair
_MAX_STRANGERS = 64  # connections that have not yet shown the token
_ACCEPT_PAUSE = 0.5  # seconds until the next try when the system has no descriptor or thread to spare


@dataclass(frozen=True, slots=True)
class _Peer:
    """A frontend on another machine, and what it holds here."""

    link: ShmLink  # claims its queue pair
    end: EngineEnd
    since: float

    def is_gone(self) -> bool:
        """Say whether the scheduler has dropped this peer: its lease expired, or it never attached."""
        attached = self.link.load_word(self.link.addresses.attached)
        return attached == 0 and time.monotonic() - self.since > _ATTACH_GRACE

    def close(self) -> None:
        """Take its access and its queue pair back."""
        self.end.close()
        self.link.close()


def open_listener(config: EngineConfig) -> RdmaListener | None:
    """Return the configured listener, not yet started; None without --rdma-listen.

    Raises:
        ConfigError: no token, no RDMA device, or the address is not to be had.
    """
    return RdmaListener(config) if config.rdma_listen else None


class RdmaListener:
    """Own the control port and the connections of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._token = read_token(config.rdma)
        open_link(config.rdma).close()  # has this machine all it needs?
        self._lock = threading.Lock()  # of the two lists, which each connection's thread uses
        self._strangers: list[socket.socket] = []
        self._peers: list[_Peer] = []
        place = parse_place(config.rdma_listen, "--rdma-listen")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on --rdma-listen {config.rdma_listen}: {error.strerror}") from error

    def start(self) -> None:
        """Let frontends in from now on; the region must be published."""
        self._socket.listen()
        threading.Thread(target=self._run, name="rdma-listener", daemon=True).start()
        logger.info("frontends may connect by RDMA at %s", self._config.rdma_listen)

    def _run(self) -> None:
        troubled = False
        while True:
            try:
                self._accept()
                troubled = False
            except (OSError, RuntimeError) as error:  # no descriptor, no memory or no thread
                if not troubled:
                    logger.error("no frontend can connect by RDMA for now: %s", error)
                troubled = True
                time.sleep(_ACCEPT_PAUSE)

    def _accept(self) -> None:
        connection, (host, *_) = self._socket.accept()
        with self._lock:
            if len(self._strangers) >= _MAX_STRANGERS:
                _hang_up(self._strangers.pop(0))
            self._strangers.append(connection)
        try:
            threading.Thread(target=self._serve, args=(connection, host), name="rdma-set-up", daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _serve(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                self._admit(connection)
                logger.info("a frontend at %s has connected", host)
            except (BlinkError, OSError) as error:
                logger.warning("a frontend at %s could not connect: %s", host, error)
            except Exception:
                logger.exception("a frontend at %s could not connect", host)
            finally:
                self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)

    def _admit(self, connection: socket.socket) -> None:
        lines = Lines(connection)
        found: list[_Peer] = []

        def prepare(frontend: Message) -> Descriptor:
            self._forget(connection)  # it has shown the token
            descriptor, peer = self._prepare(frontend)
            found.append(peer)
            return descriptor

        try:
            admit(lines, self._token, self._config.rdma.rdma_backend, prepare)
            found[0].end.await_peer(lines)
        except BaseException:
            for peer in found:
                self._dismiss(peer)
            raise

    def _prepare(self, frontend: Message) -> tuple[Descriptor, _Peer]:
        """Claim a queue pair for a frontend, as one of this host would, and give it access."""
        self._dismiss_lost_peers()
        with ExitStack() as undo:
            link = ShmConnector(self._config.region).open()
            undo.callback(link.close)
            end = open_engine_end(self._config.rdma, frontend)
            undo.callback(end.close)
            shared, pair = _memory_of(link)
            descriptor = Descriptor(end.offer(shared, pair), shared, pair, link.index, int(link.header["epoch"]))
            undo.pop_all()
        peer = _Peer(link, end, time.monotonic())
        with self._lock:
            self._peers.append(peer)
        return descriptor, peer

    def _dismiss_lost_peers(self) -> None:
        with self._lock:
            gone = [peer for peer in self._peers if peer.is_gone()]
        for peer in gone:
            self._dismiss(peer)

    def _dismiss(self, peer: _Peer) -> None:
        with self._lock:
            if peer not in self._peers:  # another thread was first
                return
            self._peers.remove(peer)
        peer.close()


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it has gone by itself
        connection.shutdown(socket.SHUT_RDWR)


def _memory_of(link: ShmLink) -> tuple[RemoteMemory, RemoteMemory]:
    """Return what a frontend needs: header and control block, and its queue pair."""
    shared_bytes = CONSTANTS["control_offset"] + CONTROL.itemsize
    address, base, pair_bytes = link.region.address, link.addresses.base, int(link.header["queue_pair_bytes"])
    return RemoteMemory(0, shared_bytes, address), RemoteMemory(base, pair_bytes, address + base)
