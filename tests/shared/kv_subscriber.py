# SPDX-License-Identifier: Apache-2.0
"""A subscriber of KV events as routers have it: plain ZeroMQ, and vLLM's structs to decode what comes."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

_WAIT_MS = 20_000


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's KVEventBatch; its events stay arrays."""

    ts: float
    events: list[list[Any]]
    data_parallel_rank: int | None = None


class Subscriber:
    """Listens to one publisher, and asks it for what was missed."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self.topics: set[bytes] = set()

    def next(self, wait_ms: int = _WAIT_MS) -> tuple[int, Batch] | None:
        """Return the next batch and its number; None: nothing comes in time."""
        if not self._sub.poll(wait_ms):
            return None
        topic, number, payload = self._sub.recv_multipart()
        self.topics.add(topic)
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)

    def replay(self, first: int) -> list[tuple[int, Batch]]:
        """Return the batches from a number on that the publisher still has."""
        asking = self._context.socket(zmq.DEALER)  # a REQ socket would take the first answer alone
        asking.connect(self._replay_endpoint)
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, Batch]] = []
        while True:
            assert asking.poll(_WAIT_MS), "a replay does not end"
            empty, number, payload = asking.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                asking.close(linger=0)
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)))

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)
