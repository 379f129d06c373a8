# SPDX-License-Identifier: Apache-2.0
"""The C API of the RDMA library and the plain structs it takes. Loads the library at the first use, not at import."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blink.errors import ConfigError
from blink.region.native import declare

_U32, _U64, _I32, _PTR, _STR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p

# name: (result, arguments)
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "blink_verbs_error": (_STR, []),
    "blink_verbs_errno": (_I32, []),
    "blink_endpoint_open": (_PTR, [_STR, _I32]),
    "blink_endpoint_close": (None, [_PTR]),
    "blink_endpoint_info": (None, [_PTR, _PTR]),
    "blink_endpoint_add_memory": (_U32, [_PTR, _PTR, _U64, _U32]),
    "blink_endpoint_receive_from": (_U32, [_PTR, _PTR]),
    "blink_channel_open": (_PTR, [_STR, _I32]),
    "blink_channel_close": (None, [_PTR]),
    "blink_channel_info": (None, [_PTR, _PTR]),
    "blink_channel_connect": (_U32, [_PTR, _PTR, _PTR, _PTR]),
    "blink_channel_write": (None, [_PTR, _U64, _PTR, _U32]),
    "blink_channel_store_u32": (None, [_PTR, _U64, _U32]),
    "blink_channel_read": (_U32, [_PTR, _U64, _PTR, _U32]),
    "blink_channel_start": (None, [_PTR, _U64, _U32, _U32, _I32, _U32]),
    "blink_channel_watch": (None, [_PTR, _U32]),
    "blink_channel_drain": (_U32, [_PTR, _PTR, _U32]),
    "blink_channel_failure": (_STR, [_PTR]),
    "blink_channel_counters": (None, [_PTR, _PTR]),
}


class EndpointInfo(ctypes.Structure):
    """What one end of a connection must know of the other; EndpointInfo of csrc/rdma/verbs.h."""

    _fields_ = (("gid", ctypes.c_uint8 * 16), ("qpn", _U32), ("psn", _U32), ("lid", _U32), ("mtu", _U32))


class RemoteWindow(ctypes.Structure):
    """Memory of the engine that the other end may reach; RemoteWindow of csrc/rdma/verbs_link.h."""

    _fields_ = (("start", _U64), ("bytes", _U64), ("address", _U64), ("key", _U32), ("reserved", _U32))


class ChannelCounters(ctypes.Structure):
    """What a channel has sent so far."""

    _fields_ = (("writes", _U64), ("reads", _U64), ("completions", _U64))


def library_path() -> Path:
    """Return where the library is: BLINK_VERBS_LIBRARY, or beside this package."""
    return Path(os.environ.get("BLINK_VERBS_LIBRARY") or Path(__file__).parents[2] / "lib" / "libblink_verbs.so")


@functools.cache
def verbs() -> ctypes.CDLL:
    """Return the loaded library.

    Raises:
        ConfigError: it was not built, or libibverbs is missing.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"RDMA needs {path.name}, which cannot be loaded ({error}): install rdma-core with its headers "
            "(Debian and Ubuntu: libibverbs-dev ibverbs-providers), then reinstall Blink from source"
        ) from error
    declare(library, _FUNCTIONS)
    return library


def check_verbs(result: int | None) -> int:
    """Return the result of a call of the library that gives 0 or null when it fails.

    Raises:
        ConfigError: it failed; the message says what to change.
    """
    if result:
        return result
    message = f"RDMA: {verbs().blink_verbs_error().decode()}"
    if verbs().blink_verbs_errno() == errno.ENOMEM:
        message += "; raise the limit of locked memory (`ulimit -l unlimited`, or LimitMEMLOCK=infinity for a service)"
    raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Device:
    """Which RDMA device to use, and which of its addresses."""

    name: str = ""  # empty: the first with an active port
    gid_index: int = -1  # -1: the first RoCE v2 address of IPv4, else of any kind


class Endpoint:
    """The engine's end of a connection: gives a peer access to memory and never sends anything."""

    def __init__(self, device: Device) -> None:
        """Open the device.

        Raises:
            ConfigError: there is no such device, or no library.
        """
        self._handle = check_verbs(verbs().blink_endpoint_open(device.name.encode(), device.gid_index))

    def info(self) -> EndpointInfo:
        """Return what the peer must know."""
        info = EndpointInfo()
        verbs().blink_endpoint_info(self._handle, ctypes.byref(info))
        return info

    def add_memory(self, address: int, num_bytes: int, *, start: int, writable: bool) -> RemoteWindow:
        """Let the peer read memory, and write it if `writable`; `start` says where in the region it is.

        Raises:
            ConfigError: the memory cannot be registered.
        """
        key = check_verbs(verbs().blink_endpoint_add_memory(self._handle, address, num_bytes, writable))
        return RemoteWindow(start, num_bytes, address, key, 0)

    def receive_from(self, peer: EndpointInfo) -> None:
        """Serve the peer's one-sided requests from now on.

        Raises:
            ConfigError: there is no path to the peer.
        """
        check_verbs(verbs().blink_endpoint_receive_from(self._handle, ctypes.byref(peer)))

    def close(self) -> None:
        """Take all access back."""
        if self._handle:
            verbs().blink_endpoint_close(self._handle)
            self._handle = 0


class Channel:
    """The frontend's end of a connection."""

    def __init__(self, device: Device) -> None:
        """Open the device.

        Raises:
            ConfigError: there is no such device, or no library.
        """
        self._handle = check_verbs(verbs().blink_channel_open(device.name.encode(), device.gid_index))

    @property
    def handle(self) -> int:
        """The native object, for `verbs()`."""
        return self._handle

    def info(self) -> EndpointInfo:
        """Return what the peer must know."""
        info = EndpointInfo()
        verbs().blink_channel_info(self._handle, ctypes.byref(info))
        return info

    def connect(self, peer: EndpointInfo, shared: RemoteWindow, pair: RemoteWindow) -> None:
        """Connect to the engine's end and its two windows.

        Raises:
            ConfigError: no memory can be registered, or there is no path to the peer.
        """
        arguments = (ctypes.byref(item) for item in (peer, shared, pair))
        check_verbs(verbs().blink_channel_connect(self._handle, *arguments))

    def read(self, offset: int, out: np.ndarray) -> bool:
        """Read bytes of the engine's memory into `out` (at most 4096) and wait for them; False after a failure."""
        return bool(verbs().blink_channel_read(self._handle, offset, out.ctypes.data, out.nbytes))

    def start(self, cq_offset: int, entries: int, head: int, event_fd: int, interval_us: int) -> None:
        """Collect completions from `head` on in a thread, which makes `event_fd` readable."""
        verbs().blink_channel_start(self._handle, cq_offset, entries, head, event_fd, interval_us)

    def watch(self, active: bool) -> None:
        """Say whether completions are expected at all."""
        verbs().blink_channel_watch(self._handle, active)

    def failure(self) -> str:
        """Say why the connection is broken; empty while it works."""
        return verbs().blink_channel_failure(self._handle).decode() if self._handle else "closed"

    def counters(self) -> ChannelCounters:
        """Return how much was sent so far."""
        counters = ChannelCounters()
        verbs().blink_channel_counters(self._handle, ctypes.byref(counters))
        return counters

    def close(self) -> None:
        """Break the connection."""
        if self._handle:
            verbs().blink_channel_close(self._handle)
            self._handle = 0
