# SPDX-License-Identifier: Apache-2.0
"""The C API of the RDMA library and the plain structs it takes. Loads the library at the first use, not at import."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from blink.errors import ConfigError
from blink.link.rdma.message import Lines, Message, RemoteMemory, struct_from_message, struct_to_message
from blink.region.native import declare

_U32, _U64, _I32, _PTR, _STR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p

# name: (result, arguments)
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "blink_verbs_error": (_STR, []),
    "blink_verbs_errno": (_I32, []),
    "blink_verbs_end_open": (_PTR, [_STR, _I32]),
    "blink_verbs_end_close": (None, [_PTR]),
    "blink_verbs_end_info": (None, [_PTR, _PTR]),
    "blink_verbs_end_add_memory": (_U32, [_PTR, _PTR, _U64, _U32]),
    "blink_verbs_end_receive_from": (_U32, [_PTR, _PTR]),
    "blink_verbs_link_open": (_PTR, [_STR, _I32]),
    "blink_verbs_link_close": (None, [_PTR]),
    "blink_verbs_link_info": (None, [_PTR, _PTR]),
    "blink_verbs_link_connect": (_U32, [_PTR, _PTR, _PTR, _PTR]),
    "blink_verbs_link_write": (None, [_PTR, _U64, _PTR, _U32]),
    "blink_verbs_link_store_u32": (None, [_PTR, _U64, _U32]),
    "blink_verbs_link_read": (_U32, [_PTR, _U64, _PTR, _U32]),
    "blink_verbs_link_failure": (_STR, [_PTR]),
    "blink_verbs_link_counters": (None, [_PTR, _PTR]),
}


class EndInfo(ctypes.Structure):
    """What one end of a connection must know of the other; EndInfo of csrc/rdma/verbs.h."""

    _fields_ = (("gid", ctypes.c_uint8 * 16), ("qpn", _U32), ("psn", _U32), ("lid", _U32), ("mtu", _U32))


class LinkCounters(ctypes.Structure):
    """What a link has sent so far."""

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


class VerbsEnd:
    """The engine's end of a connection: gives a peer access to memory and never sends anything."""

    def __init__(self, device: Device, peer: Message) -> None:
        """Open the device, and serve the peer's one-sided requests from now on.

        Raises:
            ConfigError: there is no such device, no library or no path to the peer.
            HandshakeError: the description of the peer is none.
        """
        info = struct_from_message(EndInfo, peer)
        self._handle = check_verbs(verbs().blink_verbs_end_open(device.name.encode(), device.gid_index))
        try:
            check_verbs(verbs().blink_verbs_end_receive_from(self._handle, ctypes.byref(info)))
        except ConfigError:
            self.close()
            raise

    def offer(self, shared: RemoteMemory, pair: RemoteMemory) -> Message:
        """Let the peer read `shared`, and read and write `pair`; fill in their keys, and describe this end.

        Raises:
            ConfigError: the memory cannot be registered.
        """
        for memory, writable in ((shared, False), (pair, True)):
            memory.key = check_verbs(
                verbs().blink_verbs_end_add_memory(self._handle, memory.address, memory.bytes, writable)
            )
        info = EndInfo()
        verbs().blink_verbs_end_info(self._handle, ctypes.byref(info))
        return struct_to_message(info)

    def await_peer(self, lines: Lines) -> None:
        """Wait until the peer says that it has connected: the device does the rest."""
        lines.receive()

    def close(self) -> None:
        """Take all access back."""
        if self._handle:
            verbs().blink_verbs_end_close(self._handle)
            self._handle = 0
