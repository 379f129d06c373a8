# SPDX-License-Identifier: Apache-2.0
"""The shared memory that joins engine and frontends: created by the engine, opened and checked by frontends."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from blink.errors import BlinkError, ConfigError, EngineUnavailableError, LayoutMismatchError
from blink.region.files import (
    check_unserved,
    is_served,
    mark_region,
    open_own,
    region_path,
    remove_own,
    remove_stale_regions,
    remove_unserved,
    set_lock,
    spare_path,
)
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
from blink.region.outside import HASH_KEY_VARIABLE

_HASH_KEY_BYTES = HEADER["hash_key"].shape[0]


class Region:
    """A mapped region. Every word has one writer, named in csrc/region/."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._spare: Path | None = None  # a second name of the file, known to its engine alone
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
        """Store a word of the control block that the engine's host process writes."""
        store = lib.blink_store_u64 if CONTROL[field].itemsize == 8 else lib.blink_store_u32
        store(self.control_address + field_offset(CONTROL, field), value)

    def trace(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the ring of step records."""
        return self.view(TRACE_ENTRY, int(self.header["trace_offset"]), int(self.geometry["trace_entries"]))

    def is_current(self) -> bool:
        """Say whether the file is still there under its name, and whole."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return found.st_ino == self.inode and found.st_size == len(self.bytes)

    def keep_spare(self, name: str) -> None:
        """Give the published file a second name, from which restore() makes the first again."""
        spare = spare_path(name)
        os.link(self.path, spare, follow_symlinks=False)
        self._spare = spare

    def restore(self) -> bool:
        """Give a file that was deleted its name again; say whether that was possible."""
        if self._spare is None:
            return False
        try:
            os.link(self._spare, self.path, follow_symlinks=False)
        except OSError:
            return False
        return self.is_current()

    def remove_spare(self) -> None:
        """Delete the second name."""
        if self._spare is not None:
            remove_own(self._spare, self.inode)
            self._spare = None

    def remove(self) -> None:
        """Delete the file's names, unless other files have taken them."""
        remove_own(self.path, self.inode)
        self.remove_spare()

    def close(self) -> None:
        """Close the file and give back its locks; the mapping goes when its last view does."""
        if self.fd >= 0:
            # The mapping holds a descriptor of its own, which would keep the locks.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            set_lock(self.fd, fcntl.F_UNLCK)
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


def create_region(name: str, geometry: np.ndarray[Any, Any], model: str) -> Region:
    """Create the region of a new engine under a name of its own; publish_region() makes it visible.

    Raises:
        ConfigError: the name is taken, /dev/shm is too small, or the shared hash key is none.
    """
    check_unserved(name)
    remove_stale_regions()
    spare, hash_key = spare_path(name), _hash_key()
    size = lib.blink_region_bytes(geometry.ctypes.data)
    fd = -1
    try:
        fd = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        is_served(fd)
        mark_region(fd)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
            spare.unlink()
        raise ConfigError(
            f"/dev/shm has no room for the region of {size >> 20} MiB ({error.strerror}); enlarge it "
            "(for containers: --shm-size) or lower --num-queue-pairs or --prompt-arena-bytes"
        ) from error
    region = Region(spare, fd)
    lib.blink_region_init(region.address, geometry.ctypes.data, hash_key, model.encode()[:255])
    return region


def _hash_key() -> bytes:
    """Return the secret of the block hashes: a new one, or that which several engines share.

    Raises:
        ConfigError: what the environment holds is none.
    """
    shared = os.environ.get(HASH_KEY_VARIABLE)
    if shared is None:
        return os.urandom(_HASH_KEY_BYTES)
    try:
        key = bytes.fromhex(shared)
    except ValueError:
        key = b""
    if len(key) != _HASH_KEY_BYTES:
        raise ConfigError(f"{HASH_KEY_VARIABLE} must hold {2 * _HASH_KEY_BYTES} hexadecimal digits")
    return key


def publish_region(region: Region, name: str) -> None:
    """Give the region its boot id and its name; frontends of an earlier engine notice the new file.

    Raises:
        ConfigError: another engine has taken the name since, or the file behind it is none of a region.
    """
    (epoch,) = struct.unpack("<Q", os.urandom(8))
    lib.blink_region_publish(region.address, epoch | 1)
    path = region_path(name)
    remove_unserved(path)
    try:
        os.link(region.path, path)  # unlike rename(), it takes the name from nobody
    except OSError as error:
        region.remove()
        check_unserved(name)
        raise ConfigError(f"{path} is no region's file; delete it or give another --region") from error
    remove_own(region.path, region.inode)
    region.path = path


def open_region(name: str) -> Region:
    """Open and check a running engine's region.

    Raises:
        EngineUnavailableError: no engine has published it, or it was truncated.
        LayoutMismatchError: engine and frontend are of different builds.
        ConfigError: its file is somebody else's.
    """
    path = region_path(name)
    try:
        fd = open_own(path)
    except FileNotFoundError:
        raise EngineUnavailableError("the engine is not running or still starting") from None
    try:
        check_file(fd, path)
    except BlinkError:
        os.close(fd)
        raise
    return Region(path, fd)


def check_file(fd: int, path: Path) -> None:
    """Check that a region's file is whole and of this build, before more of it is read.

    Raises:
        EngineUnavailableError: it was truncated.
        LayoutMismatchError: engine and reader are of different builds.
    """
    data = os.pread(fd, HEADER.itemsize, 0)
    if len(data) < HEADER.itemsize:
        raise EngineUnavailableError(f"the engine's memory {path} was truncated")
    header = np.frombuffer(data, HEADER)[0]
    check_header(header)
    geometry = np.ascontiguousarray(header["geometry"])
    if os.fstat(fd).st_size != lib.blink_region_bytes(geometry.ctypes.data):
        raise EngineUnavailableError(f"the engine's memory {path} was truncated")


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
        if set_lock(region.fd, fcntl.F_WRLCK, index, 1):
            return index
    return None


def all_queue_pairs_taken() -> EngineUnavailableError:
    """Return the error for a frontend that found no queue pair to claim."""
    return EngineUnavailableError("all queue pairs of the engine are taken; start it with more --num-queue-pairs")
