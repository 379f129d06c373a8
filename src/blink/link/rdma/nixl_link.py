# SPDX-License-Identifier: Apache-2.0
"""Both ends over NIXL. Each transfer is waited for, as NIXL orders nothing between them."""

from __future__ import annotations

import base64
import binascii
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from blink.link.rdma.handshake import Descriptor
from blink.link.rdma.link import RdmaLink
from blink.link.rdma.message import HandshakeError, Lines, Message, RemoteMemory, read_field
from blink.link.rdma.nixl_agent import Agent, TransferError

if TYPE_CHECKING:
    from _ctypes import CFuncPtr

_BUFFER_BYTES = 64 << 10  # of one transfer

# A ReadRegion of csrc/rdma/collector.h.
_ReadRegion = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32)

# A StoreWord of csrc/cpu/lease_renewer.h.
_StoreWord = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)


def native_read(read: Callable[[int, npt.NDArray[np.generic]], bool]) -> CFuncPtr:
    """Return a function for the collector of the native library that reads by `read`; keep it while that may call."""

    def call(_context: int | None, offset: int, out: int, num_bytes: int) -> int:
        return read(offset, np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(out)))

    return _ReadRegion(call)


def parse_metadata(end: Message) -> bytes:
    """Return the metadata of the engine's agent.

    Raises:
        HandshakeError: the description of the engine's end holds none.
    """
    try:
        return base64.b64decode(read_field(end, "metadata", str), validate=True)
    except (binascii.Error, ValueError) as error:
        raise HandshakeError("the field 'metadata' is wrong") from error


class NixlEnd:
    """The engine's end: gives a peer access to memory; makes no call between await_peer() and close()."""

    def __init__(self, transports: str) -> None:
        """Create an agent.

        Raises:
            ConfigError: there is no NIXL, or none of the transports.
        """
        self._agent = Agent(transports)

    def offer(self, shared: RemoteMemory, pair: RemoteMemory) -> Message:
        """Let the peer reach the memory, all of it for writing too: NIXL knows none that may only be read.

        Raises:
            ConfigError: the memory cannot be registered.
        """
        for memory in (shared, pair):
            self._agent.register(memory.address, memory.bytes)
        return {"metadata": base64.b64encode(self._agent.metadata()).decode()}

    def await_peer(self, lines: Lines) -> None:
        """Answer the peer's connection until it has seen its first transfers end."""
        while not lines.is_readable():
            self._agent.progress()
            time.sleep(0.0002)
        lines.receive()

    def close(self) -> None:
        """Take all access back."""
        self._agent.close()


class NixlLink(RdmaLink):
    """A queue pair reached by NIXL. After a failure nothing is sent any more."""

    backend: ClassVar[str] = "nixl"
    min_interval_us: ClassVar[int] = 200  # as each read takes the interpreter's lock

    def __init__(self, transports: str) -> None:
        """Create an agent.

        Raises:
            ConfigError: there is no NIXL, or none of the transports.
        """
        super().__init__()
        self._agent = Agent(transports)
        self._buffer = np.zeros(_BUFFER_BYTES, np.uint8)
        self._lock = threading.Lock()  # of the agent, the buffer and the failure
        self._failure = ""
        self._native_read = native_read(self.read)
        self._native_store = _StoreWord(lambda _context, offset, value: self.store_word(offset, value))

    def info(self) -> Message:
        """Describe nothing: the engine's agent writes to no frontend."""
        return {}

    def reach(self, descriptor: Descriptor) -> None:
        """Connect to the engine's end, which must be in await_peer(), and check by which transport."""
        self._shared, self._pair = descriptor.shared, descriptor.pair
        self._agent.register(self._buffer.ctypes.data, _BUFFER_BYTES)
        self._agent.add_peer(parse_metadata(descriptor.end))
        last = self._pair.start + self._pair.bytes - 4  # word of the arena, which holds nothing before a submission
        if self.read(last, self._word):
            self.write(last, self._word.tobytes())
        if not self._failure:
            self._agent.check_transports()

    def read(self, offset: int, out: npt.NDArray[np.generic]) -> bool:
        with self._lock:
            if not self._transfer("READ", offset, out.nbytes):
                return False
            out.reshape(-1).view(np.uint8)[:] = self._buffer[: out.nbytes]
            return True

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes and wait until the engine's memory has them."""
        with self._lock:
            for start in range(0, len(data), _BUFFER_BYTES):
                part = np.frombuffer(data, np.uint8)[start : start + _BUFFER_BYTES]
                self._buffer[: len(part)] = part
                if not self._transfer("WRITE", offset + start, len(part)):
                    return

    def store_word(self, offset: int, value: int) -> None:
        self.write(offset, np.uint32(value).tobytes())

    def native_reader(self) -> tuple[CFuncPtr, int | None]:
        return self._native_read, None

    def native_writer(self) -> tuple[CFuncPtr, int | None]:
        return self._native_store, None

    def failure(self) -> str:
        return self._failure

    def disconnect(self) -> None:
        with self._lock:
            self._failure = self._failure or "closed"
            self._agent.close()

    def _transfer(self, operation: str, offset: int, num_bytes: int) -> bool:
        if self._failure:
            return False
        memory = self._pair if offset >= self._pair.start else self._shared
        remote = memory.address + offset - memory.start
        try:
            self._agent.transfer(operation, self._buffer.ctypes.data, remote, num_bytes)
        except TransferError as error:
            self._failure = error.message
        return not self._failure
