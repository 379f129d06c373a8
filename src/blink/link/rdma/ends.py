# SPDX-License-Identifier: Apache-2.0
"""The two ends of an RDMA connection, over the configured backend: the engine's, and the frontend's link."""

from __future__ import annotations

from typing import Protocol

from blink.link.rdma.link import RdmaLink
from blink.link.rdma.message import Lines, Message, RemoteMemory
from blink.link.rdma.nixl_link import NixlEnd, NixlLink
from blink.link.rdma.verbs import Device, VerbsEnd
from blink.link.rdma.verbs_link import VerbsLink
from blink.rdma_config import RdmaConfig


class EngineEnd(Protocol):
    """The engine's end of a connection: gives one peer access to memory, and never sends anything of its own."""

    def offer(self, shared: RemoteMemory, pair: RemoteMemory) -> Message:
        """Let the peer read `shared`, and read and write `pair`; fill in their keys, and describe this end.

        Raises:
            ConfigError: the memory cannot be registered.
        """
        ...

    def await_peer(self, lines: Lines) -> None:
        """Do what the peer needs to connect, until it says that it has.

        Raises:
            BlinkError, OSError: it does not.
        """
        ...

    def close(self) -> None:
        """Take all access back."""
        ...


def open_engine_end(config: RdmaConfig, peer: Message) -> EngineEnd:
    """Open the engine's end of a connection to the frontend's end that `peer` describes.

    Raises:
        BlinkError: this machine lacks what the backend needs, or there is no path to the peer.
    """
    if config.rdma_backend == "nixl":
        return NixlEnd(config.nixl_transports)  # the peer finds it, not the other way round
    return VerbsEnd(_device(config), peer)


def open_link(config: RdmaConfig) -> RdmaLink:
    """Open a frontend's link, not yet connected.

    Raises:
        ConfigError: this machine lacks what the backend needs.
    """
    if config.rdma_backend == "nixl":
        return NixlLink(config.nixl_transports)
    return VerbsLink(_device(config))


def _device(config: RdmaConfig) -> Device:
    return Device(config.rdma_device, config.rdma_gid_index)
