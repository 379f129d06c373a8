# SPDX-License-Identifier: Apache-2.0
"""Publishes events of the KV cache over ZeroMQ as vLLM does, on a thread of the engine's host process.

A thread that is slow or frozen costs freshness alone: the scheduler never waits for it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from blink.config import EngineConfig
from blink.engine.kv_event_wire import to_wire
from blink.errors import ConfigError
from blink.host.extras import how_to_install
from blink.kv_events import KvEvents
from blink.region.block_hashes import hash_root
from blink.region.files import replica_rank
from blink.region.kv_events import CacheEvent, KvEventRing
from blink.region.layout import KvEventKind
from blink.region.memory import Region

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger("blink.engine")

_POLL_MS: Final = 10
_BATCH_EVENTS: Final = 2048
_END: Final = (-1).to_bytes(8, "big", signed=True)  # of a replay
_START: Final = CacheEvent(KvEventKind.CLEARED)  # of an engine's life: what another one had is void


class KvPublisher:
    """A PUB socket with batches of events, and a ROUTER socket that sends old ones again."""

    def __init__(self, ring: KvEventRing, settings: KvEvents, *, block_size: int, rank: int) -> None:
        """Open the sockets; rank: of an engine among those of a server, by which ports differ.

        Raises:
            ConfigError: the libraries are not installed, or an endpoint cannot be had.
        """
        zmq, msgpack = _load("zmq"), _load("msgspec.msgpack")
        self._zmq, self._encode = zmq, msgpack.Encoder().encode
        self._ring, self._block_size, self._rank = ring, block_size, rank
        self._topic, self._number = settings.topic.encode(), 0
        self._sent = deque[tuple[int, bytes]](maxlen=settings.buffer_steps)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blink-kv-events", daemon=True)
        self._context = zmq.Context()
        try:
            self._publisher = self._open_publisher(settings)
            self._replay = self._open_replay(settings)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: no socket at an endpoint: {error}") from error

    def start(self) -> None:
        """Publish from now on."""
        self._thread.start()

    def close(self) -> None:
        """Publish what is left, and close the sockets."""
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _open_publisher(self, settings: KvEvents) -> zmq.Socket[bytes]:
        socket = self._context.socket(self._zmq.PUB)
        socket.set_hwm(settings.hwm)
        endpoint = offset_port(settings.endpoint, self._rank)
        binds = any(part in endpoint for part in ("*", "::", "ipc://", "inproc://"))
        (socket.bind if binds else socket.connect)(endpoint)
        return socket

    def _open_replay(self, settings: KvEvents) -> zmq.Socket[bytes] | None:
        if not settings.replay_endpoint:
            return None
        socket = self._context.socket(self._zmq.ROUTER)
        socket.bind(offset_port(settings.replay_endpoint, self._rank))
        return socket

    def _run(self) -> None:
        self._send([_START])
        while not self._ends.is_set():
            try:
                self._serve()
            except self._zmq.ZMQError:
                logger.exception("events of the KV cache could not be sent")
        while events := self._ring.take(_BATCH_EVENTS):
            self._send(events)

    def _serve(self) -> None:
        """Publish what is new, and answer those who missed something, or wait a little."""
        events = self._ring.take(_BATCH_EVENTS)
        if events:
            self._send(events)
        wait = 0 if events else _POLL_MS
        if self._replay is None:
            self._ends.wait(wait / 1000)
        elif self._replay.poll(wait):
            self._answer(self._replay)

    def _send(self, events: list[CacheEvent]) -> None:
        if any(event.kind == KvEventKind.RESTARTED for event in events):
            logger.warning("events of the KV cache were read too late: all blocks are published anew")
        payload = self._encode([time.time(), to_wire(events, self._block_size), self._rank])
        self._sent.append((self._number, payload))
        self._publisher.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._number += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            logger.warning("a replay of KV events was asked for in an unknown form")
            return
        first = int.from_bytes(rest[1], "big")
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", _END, b""))


def _load(name: str) -> Any:
    """Return a module of the extra `kv-events`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"--kv-events-config needs pyzmq and msgspec: {how_to_install('kv-events')}"
        raise ConfigError(text) from error


def offset_port(endpoint: str, rank: int) -> str:
    """Return the endpoint of an engine among several: its port, or its name, differs by its rank, as in vLLM.

    Raises:
        ConfigError: there is nothing by which it could differ.
    """
    if rank == 0:
        return endpoint
    if endpoint.startswith(("inproc://", "ipc://")):
        return f"{endpoint}_dp{rank}"
    address, colon, port = endpoint.rpartition(":")
    if not (colon and port.isdecimal()):
        raise ConfigError(f"--kv-events-config: several engines need an endpoint with a port, got {endpoint!r}")
    return f"{address}:{int(port) + rank}"


def open_publishers(region: Region, config: EngineConfig) -> list[KvPublisher]:
    """Return what publishes the events of an engine; its scheduler has not started.

    Raises:
        ConfigError: it cannot be done.
    """
    if not config.kv_events.is_on:
        return []
    if not config.enable_prefix_caching:
        logger.warning("--kv-events-config: there are no events without the prefix cache")
        return []
    region.header["kv_event_root"] = np.frombuffer(hash_root(region.header["hash_key"].tobytes()), np.uint8)
    rank, block_size = replica_rank(config.region), config.block_size
    return [KvPublisher(KvEventRing(region), config.kv_events, block_size=block_size, rank=rank)]
