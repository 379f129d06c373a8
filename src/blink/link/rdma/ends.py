# SPDX-License-Identifier: Apache-2.0
"""The two ways to one-sided access, as configured: verbs, or NIXL. Their ends look alike."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from blink.config import RdmaConfig
from blink.link.rdma.nixl_link import NixlChannel, NixlEndpoint
from blink.link.rdma.nixl_transport import NixlTransport
from blink.link.rdma.verbs import Channel, Device, Endpoint, RemoteWindow
from blink.link.rdma.verbs_link import VerbsTransport
from blink.region.transport import Transport


class RdmaChannel(Protocol):
    """What a connection needs of a frontend's end besides its transport."""

    def connect(self, peer: Any, shared: RemoteWindow, pair: RemoteWindow) -> None: ...

    def read(self, offset: int, out: np.ndarray[Any, Any]) -> bool: ...

    def start(self, cq_offset: int, entries: int, head: int, event_fd: int, interval_us: int) -> None: ...

    def watch(self, active: bool) -> None: ...

    def failure(self) -> str: ...

    def close(self) -> None: ...


def device_of(config: RdmaConfig) -> Device:
    """Return the configured device."""
    return Device(config.rdma_device, config.rdma_gid_index)


def open_endpoint(config: RdmaConfig) -> Endpoint | NixlEndpoint:
    """Open the engine's end.

    Raises:
        ConfigError: this machine lacks what the backend needs.
    """
    return NixlEndpoint(config.nixl_transports) if config.rdma_backend == "nixl" else Endpoint(device_of(config))


def open_channel(config: RdmaConfig) -> Channel | NixlChannel:
    """Open a frontend's end.

    Raises:
        ConfigError: this machine lacks what the backend needs.
    """
    return NixlChannel(config.nixl_transports) if config.rdma_backend == "nixl" else Channel(device_of(config))


def transport_over(channel: RdmaChannel) -> Transport:
    """Return the transport over a channel."""
    if isinstance(channel, NixlChannel):
        return NixlTransport(channel)
    assert isinstance(channel, Channel)
    return VerbsTransport(channel)
