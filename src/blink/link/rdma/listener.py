# SPDX-License-Identifier: Apache-2.0
"""Lets frontends on other machines in: a thread with a TCP port, used while a connection is set up and never after.

Each frontend gets a queue pair of the region, and an RDMA connection in a protection domain of its own whose keys open
that queue pair's memory for reading and writing and the region's head for reading. Then the network card serves it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from blink.config import EngineConfig
from blink.errors import BlinkError, ConfigError
from blink.link.rdma.ends import open_endpoint
from blink.link.rdma.handshake import Descriptor, LineChannel, admit, parse_place, read_token
from blink.link.rdma.nixl_link import NixlEndpoint
from blink.link.rdma.verbs import Endpoint, RemoteWindow
from blink.link.shm import ShmTransport
from blink.region.layout import CONSTANTS, CONTROL
from blink.region.memory import QueuePairAddresses, Region, all_queue_pairs_taken, claim_queue_pair, open_region

logger = logging.getLogger("blink.engine")

_ATTACH_GRACE = 5.0  # seconds that a new peer has to attach its queue pair


@dataclass(frozen=True, slots=True)
class _Peer:
    """A frontend on another machine, and what it holds here."""

    region: Region  # opened for this peer: the claim of the queue pair goes with it
    addresses: QueuePairAddresses
    endpoint: Endpoint | NixlEndpoint
    since: float

    def is_gone(self) -> bool:
        """Say whether the scheduler has dropped this peer: its lease expired, or it never attached."""
        attached = ShmTransport(self.region).load_word(self.addresses.attached)
        return attached == 0 and time.monotonic() - self.since > _ATTACH_GRACE

    def close(self) -> None:
        """Take its access and its queue pair back."""
        self.endpoint.close()
        self.region.close()


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
        self._token = read_token(config.verbs)
        open_endpoint(config.verbs).close()
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
        while True:
            connection, (host, *_) = self._socket.accept()
            with connection:
                try:
                    self._admit(LineChannel(connection))
                    logger.info("a frontend at %s has connected", host)
                except (BlinkError, OSError) as error:
                    logger.warning("a frontend at %s could not connect: %s", host, error)
                except Exception:
                    logger.exception("a frontend at %s could not connect", host)

    def _admit(self, control: LineChannel) -> None:
        admit(control, self._token, self._prepare, self._config.verbs.rdma_backend)
        peer = self._peers[-1]
        if isinstance(peer.endpoint, NixlEndpoint):
            try:
                peer.endpoint.wire_up(control.is_readable)
                control.receive()
            except BaseException:
                self._peers.remove(peer)
                peer.close()
                raise

    def _prepare(self, frontend: Any) -> Descriptor:
        """Claim a queue pair for a frontend and give it access."""
        self._dismiss_lost_peers()
        region = open_region(self._config.region)
        endpoint = None
        try:
            index = claim_queue_pair(region)
            if index is None:
                raise all_queue_pairs_taken()
            endpoint = open_endpoint(self._config.verbs)
            addresses = QueuePairAddresses(region, index)
            shared, pair = _open_windows(region, addresses, endpoint)
            endpoint.receive_from(frontend)
        except BaseException:
            if endpoint is not None:
                endpoint.close()
            region.close()
            raise
        self._peers.append(_Peer(region, addresses, endpoint, time.monotonic()))
        return Descriptor(endpoint.info(), shared, pair, index, int(region.header["epoch"]))

    def _dismiss_lost_peers(self) -> None:
        for peer in [peer for peer in self._peers if peer.is_gone()]:
            peer.close()
            self._peers.remove(peer)


def _open_windows(
    region: Region, addresses: QueuePairAddresses, endpoint: Endpoint | NixlEndpoint
) -> tuple[RemoteWindow, RemoteWindow]:
    """Register header and control block for reading, and one queue pair for reading and writing."""
    shared = CONSTANTS["control_offset"] + CONTROL.itemsize
    base, num_bytes = addresses.base, int(region.header["queue_pair_bytes"])
    return (
        endpoint.add_memory(region.address, shared, start=0, writable=False),
        endpoint.add_memory(region.address + base, num_bytes, start=base, writable=True),
    )
