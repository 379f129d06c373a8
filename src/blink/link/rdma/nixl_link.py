# SPDX-License-Identifier: Apache-2.0
"""Both ends of a connection over NIXL, like those of `verbs.py`. Each transfer is waited for: NIXL orders none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from blink.link.rdma.collector import Collector
from blink.link.rdma.nixl_agent import Agent, AgentInfo, TransferError
from blink.link.rdma.verbs import RemoteWindow

_BUFFER_BYTES = 64 << 10  # of one transfer


class NixlEndpoint:
    """The engine's end: gives a peer access to memory; makes no call between wire-up and close."""

    def __init__(self, transports: str) -> None:
        """Create an agent.

        Raises:
            ConfigError: there is no NIXL, or none of the transports.
        """
        self._agent = Agent(transports)

    def info(self) -> AgentInfo:
        """Return what the peer must know; memory must have been added before."""
        return self._agent.info()

    def add_memory(self, address: int, num_bytes: int, *, start: int, writable: bool) -> RemoteWindow:
        """Let the peer reach memory. NIXL knows no memory that may only be read.

        Raises:
            ConfigError: the memory cannot be registered.
        """
        del writable
        self._agent.register(address, num_bytes)
        return RemoteWindow(start, num_bytes, address, 0, 0)

    def receive_from(self, peer: Any) -> None:
        """Do nothing: the peer connects to the address in `info`."""

    def wire_up(self, is_done: Callable[[], bool]) -> None:
        """Answer the peer's connection until it has seen its first transfers end."""
        while not is_done():
            self._agent.progress()
            time.sleep(0.0002)

    def close(self) -> None:
        """Take all access back."""
        self._agent.close()


class NixlChannel:
    """The frontend's end of a connection. After a failure nothing is sent any more."""

    def __init__(self, transports: str) -> None:
        """Create an agent.

        Raises:
            ConfigError: there is no NIXL, or none of the transports.
        """
        self._agent = Agent(transports)
        self._buffer = np.zeros(_BUFFER_BYTES, np.uint8)
        self._lock = threading.Lock()  # of the agent, the buffer and the failure
        self._failure = ""
        self._collector: Collector | None = None

    def info(self) -> AgentInfo:
        """Return what the peer must know: nothing."""
        return AgentInfo()

    def connect(self, peer: AgentInfo, shared: RemoteWindow, pair: RemoteWindow) -> None:
        """Connect to the engine's end, which must be in `wire_up`, and check by which transport.

        Raises:
            ConfigError: no memory can be registered, or the transport is not allowed.
        """
        self._shared, self._pair = shared, pair
        self._agent.register(self._buffer.ctypes.data, _BUFFER_BYTES)
        self._agent.add_peer(peer)
        last = np.zeros(4, np.uint8)  # of the queue pair: arena, which holds nothing before a submission
        if self.read(pair.start + pair.bytes - 4, last):
            self.write(pair.start + pair.bytes - 4, last)
        if not self._failure:
            self._agent.check_transports()

    def read(self, offset: int, out: np.ndarray[Any, Any]) -> bool:
        """Read bytes of the engine's memory into `out` (at most 64 KiB) and wait for them; False after a failure."""
        with self._lock:
            if not self._transfer("READ", offset, out.nbytes):
                return False
            out.reshape(-1).view(np.uint8)[:] = self._buffer[: out.nbytes]
            return True

    def write(self, offset: int, data: bytes | np.ndarray[Any, Any]) -> None:
        """Write bytes and wait until the engine's memory has them."""
        source = np.frombuffer(data, np.uint8)
        with self._lock:
            for start in range(0, len(source), _BUFFER_BYTES):
                piece = source[start : start + _BUFFER_BYTES]
                self._buffer[: len(piece)] = piece
                if not self._transfer("WRITE", offset + start, len(piece)):
                    return

    def _transfer(self, operation: str, offset: int, num_bytes: int) -> bool:
        if self._failure:
            return False
        window = self._pair if offset >= self._pair.start else self._shared
        remote = window.address + offset - window.start
        try:
            self._agent.transfer(operation, self._buffer.ctypes.data, remote, num_bytes)
        except TransferError as error:
            self._failure = error.message
        return not self._failure

    def start(self, cq_offset: int, entries: int, head: int, event_fd: int, interval_us: int) -> None:
        """Collect completions from `head` on in a thread, which makes `event_fd` readable."""
        self._collector = Collector(self.read, cq_offset, entries, head, event_fd, interval_us * 1e-6)
        self._collector.start()

    def watch(self, active: bool) -> None:
        """Say whether completions are expected at all."""
        if self._collector is not None:
            self._collector.watch(active)

    def drain(self, out: np.ndarray[Any, Any]) -> int:
        """Move collected completions to `out`; return how many."""
        return self._collector.drain(out) if self._collector is not None else 0

    def failure(self) -> str:
        """Say why the connection is broken; empty while it works."""
        return self._failure

    def close(self) -> None:
        """Break the connection."""
        if self._collector is not None:
            self._collector.stop()
            self._collector = None
        with self._lock:
            self._failure = self._failure or "closed"
            self._agent.close()
