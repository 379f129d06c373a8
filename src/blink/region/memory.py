# SPDX-License-Identifier: Apache-2.0
"""The shared memory that joins engine and frontends: created by the engine, opened and checked by frontends."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from blink.errors import ConfigError, EngineUnavailableError, LayoutMismatchError
from blink.region.layout import (
    CONSTANTS,
    CONTROL,
    DIGEST,
    FRONTEND_WORDS,
    HEADER,
    QUEUE_PAIR_LAYOUT,
    SCHEDULER_WORDS,
    TRACE_ENTRY,
    field_offset,
)
from blink.region.native import lib

_SHM = Path("/dev/shm")
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length (0: to the end), pid


def region_path(name: str) -> Path:
    """Return the file behind a region's name.

    Raises:
        ConfigError: the name holds characters other than letters, digits, '-', '_' and '.'.
    """
    if not name or not all(c.isalnum() or c in "-_." for c in name):
        raise ConfigError(f"the region name {name!r} may hold letters, digits, '-', '_' and '.' only")
    return _SHM / f"blink-{name}"


class Region:
    """A mapped region. Every word has one writer, named in csrc/region/layout.h."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.memory = mmap.mmap(fd, 0)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.header = self.view(HEADER, 0)[0]
        self.control = self.view(CONTROL, CONSTANTS["control_offset"])[0]

    def view(self, dtype: np.dtype[Any], offset: int, count: int = 1) -> np.ndarray[Any, np.dtype[Any]]:
        """Return `count` structs at `offset` as an array over the mapping."""
        return self.bytes[offset : offset + dtype.itemsize * count].view(dtype)

    @property
    def geometry(self) -> Any:
        """The Geometry of the engine."""
        return self.header["geometry"]

    @property
    def control_address(self) -> int:
        return self.address + CONSTANTS["control_offset"]

    def control_word(self, field: str) -> int:
        """Load a 32-bit word of the control block with acquire."""
        return lib.blink_load_u32(self.control_address + field_offset(CONTROL, field))

    def heartbeat(self) -> int:
        """Load the scheduler's heartbeat."""
        return lib.blink_load_u64(self.control_address + field_offset(CONTROL, "heartbeat"))

    def store_control(self, field: str, value: int) -> None:
        """Store a word of the control block that the engine's host process writes (drain, stop)."""
        lib.blink_store_u32(self.control_address + field_offset(CONTROL, field), value)

    def trace(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the ring of step records."""
        return self.view(TRACE_ENTRY, int(self.header["trace_offset"]), int(self.geometry["trace_entries"]))

    def close(self) -> None:
        """Close the file and give back its locks; the mapping goes when its last view does."""
        if self.fd >= 0:
            # The mapping holds a descriptor of its own, which would keep the locks.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
            os.close(self.fd)
            self.fd = -1


class Described(Protocol):
    """What says how a region is laid out: the region itself, or a connection to it."""

    header: Any
    geometry: Any


class QueuePairAddresses:
    """Where the parts of one queue pair are, in bytes from the region's start."""

    def __init__(self, region: Described | Region, index: int) -> None:
        layout: Any = np.zeros((), QUEUE_PAIR_LAYOUT)
        geometry = np.ascontiguousarray(region.geometry)
        lib.blink_queue_pair_layout(geometry.ctypes.data, layout.ctypes.data)
        self.base = int(region.header["queue_pairs_offset"]) + index * int(region.header["queue_pair_bytes"])
        self.scheduler_words = words = self.base + int(layout["scheduler_words"])
        self.sq, self.cq, self.arena = (self.base + int(layout[part]) for part in ("sq", "cq", "arena"))
        self.sq_tail, self.cq_head, self.lease, self.attach = (
            self.base + field_offset(FRONTEND_WORDS, field) for field in ("sq_tail", "cq_head", "lease", "attach")
        )
        self.sq_head, self.attached, self.cq_tail = (
            words + field_offset(SCHEDULER_WORDS, field) for field in ("sq_head", "attached", "cq_tail")
        )


def _is_served(fd: int) -> bool:
    """Say whether a live engine holds the region's lock; takes the lock if none does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def check_unserved(name: str) -> None:
    """Refuse a region name that a live engine serves.

    Raises:
        ConfigError: another engine has it.
    """
    try:
        fd = os.open(region_path(name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    served = _is_served(fd)
    os.close(fd)
    if served:
        raise ConfigError(f"another engine serves the region {name!r}; stop it or give another --region")


def remove_stale_regions() -> None:
    """Delete regions whose engine was killed more than a minute ago: nobody else would."""
    for path in _SHM.glob("blink-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        old = time.time() - os.fstat(fd).st_ctime > 60
        if old and not _is_served(fd):
            path.unlink(missing_ok=True)
        os.close(fd)


def create_region(name: str, geometry: np.ndarray[Any, Any], model: str) -> Region:
    """Create the region of a new engine under a temporary name; publish_region() makes it visible.

    Raises:
        ConfigError: the name is taken, or /dev/shm is too small.
    """
    check_unserved(name)
    remove_stale_regions()
    path = region_path(name)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    size = lib.blink_region_bytes(geometry.ctypes.data)
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _is_served(fd)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        temporary.unlink()
        raise ConfigError(
            f"/dev/shm has no room for the region of {size >> 20} MiB ({error.strerror}); enlarge it "
            "(for containers: --shm-size) or lower --num-queue-pairs or --prompt-arena-bytes"
        ) from error
    region = Region(temporary, fd)
    lib.blink_region_init(region.address, geometry.ctypes.data, os.urandom(16), model.encode()[:255])
    return region


def publish_region(region: Region, name: str) -> None:
    """Give the region its boot id and its name; frontends of an earlier engine notice the new file."""
    (epoch,) = struct.unpack("<Q", os.urandom(8))
    lib.blink_region_publish(region.address, epoch | 1)
    region.path = region.path.rename(region_path(name))


def open_region(name: str) -> Region:
    """Open and check a running engine's region.

    Raises:
        EngineUnavailableError: no engine has published it.
        LayoutMismatchError: engine and frontend are of different builds.
    """
    path = region_path(name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise EngineUnavailableError("the engine is not running or still starting") from None
    region = Region(path, fd)
    try:
        check_header(region.header)
    except LayoutMismatchError:
        region.close()
        raise
    return region


def check_header(header: Any) -> None:
    """Check that the region is laid out as this build lays it out.

    Raises:
        LayoutMismatchError: it is not.
    """
    if header["magic"] != CONSTANTS["magic"] or header["digest"] != DIGEST:
        raise LayoutMismatchError("the engine runs another build of Blink: restart engine and frontends together")


def claim_queue_pair(region: Region) -> int | None:
    """Lock the first queue pair that no live process holds; the lock goes with the process. None if all are taken."""
    for index in range(int(region.geometry["num_queue_pairs"])):
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        try:
            fcntl.fcntl(region.fd, fcntl.F_OFD_SETLK, request)
        except OSError:
            continue
        return index
    return None


def all_queue_pairs_taken() -> EngineUnavailableError:
    """Return the error for a frontend that found no queue pair to claim."""
    return EngineUnavailableError("all queue pairs of the engine are taken; start it with more --num-queue-pairs")
