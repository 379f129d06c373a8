# SPDX-License-Identifier: Apache-2.0
"""Files in /dev/shm: whose they are, who serves a region, and what may be deleted.

/dev/shm is everybody's. A file there is used only if it is a regular file of this user that nobody else may open. Links
are never followed. Only files are deleted that are known to be regions or have a name that this server reserved.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from pathlib import Path

from blink.errors import ConfigError
from blink.region.constants import CONSTANTS

SHM = Path("/dev/shm")
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length (0: to the end), pid
_RESERVATION = "~lock"  # '~' is in no region's name
_SPARE = "~spare-"
_REPLICA = ".dp"  # data parallel: before an engine's number
_MAGIC = struct.pack("=Q", CONSTANTS["magic"])
_STALE_SECONDS = 60.0


def region_path(name: str) -> Path:
    """Return the file behind a region's name.

    Raises:
        ConfigError: the name holds characters other than letters, digits, '-', '_' and '.'.
    """
    if not name or not all(c.isalnum() or c in "-_." for c in name):
        raise ConfigError(f"the region name {name!r} may hold letters, digits, '-', '_' and '.' only")
    return SHM / f"blink-{name}"


def engine_regions(name: str, count: int) -> list[str]:
    """Return the regions of the engines that share a server: its own name for one, else NAME.dp0, NAME.dp1 ..."""
    return [name] if count == 1 else [f"{name}{_REPLICA}{index}" for index in range(count)]


def server_region(name: str) -> str:
    """Return the name of the server that has an engine's region."""
    server, replica, index = name.rpartition(_REPLICA)
    return server if replica and index.isdecimal() else name


def replica_rank(name: str) -> int:
    """Return the number of an engine among those that share a server."""
    return int(name.rpartition(_REPLICA)[2]) if server_region(name) != name else 0


def open_own(path: Path, flags: int = os.O_RDWR, forbidden: int = 0o077) -> int:
    """Open a file that must be this user's, with no bit of its mode `forbidden`; return its descriptor.

    Raises:
        FileNotFoundError: it is not there.
        ConfigError: it is a link, somebody else's, open to others or not to be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}; is it somebody else's, or a link?") from error
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & forbidden:
        return fd
    os.close(fd)
    raise ConfigError(
        f"{path} is not used: it must be a file of this user (id {os.geteuid()}) that nobody else may open, "
        f"but it belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}"
    )


def remove_own(path: Path, inode: int) -> None:
    """Delete a file unless another one has taken its name."""
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        pass


def set_lock(fd: int, kind: int, start: int = 0, length: int = 0) -> bool:
    """Lock bytes of a file for this open file (length 0: to the end); say whether that was possible."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
    except OSError:
        return False
    return True


def is_served(fd: int) -> bool:
    """Say whether a live engine holds the region's lock; takes the lock if none does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def check_unserved(name: str) -> None:
    """Refuse a region name that another server or engine has; this process's supervisor is none.

    Raises:
        ConfigError: another one has it, or its file is somebody else's.
    """
    holder = _read_holder(_reservation_path(region_path(name)))
    if holder is not None and not _is_own(holder):
        raise ConfigError(f"process {holder}, a server, has the region {name!r}; stop it or give another --region")
    try:
        fd = open_own(region_path(name))
    except FileNotFoundError:
        return
    served = is_served(fd)
    os.close(fd)
    if served:
        raise ConfigError(f"another engine serves the region {name!r}; stop it or give another --region")


def remove_unserved(path: Path) -> None:
    """Delete a region's file if its engine is dead, and the spare names of dead engines.

    A file that does not begin as a region is left alone, unless this process or its supervisor has reserved the name.
    """
    try:
        is_reserved = _is_own(_read_holder(_reservation_path(path)))
    except ConfigError:
        is_reserved = False
    for each in [path, *path.parent.glob(f"{path.name}{_SPARE}*")]:
        _remove_unserved(each, is_reserved)


def _remove_unserved(path: Path, is_reserved: bool) -> None:
    try:
        fd = open_own(path)
    except (FileNotFoundError, ConfigError):
        return
    try:
        if not is_served(fd) and (is_reserved or os.pread(fd, len(_MAGIC), 0) in (_MAGIC, b"")):
            remove_own(path, os.fstat(fd).st_ino)
    finally:
        os.close(fd)


def remove_stale_regions() -> None:
    """Delete what engines and servers that were killed more than a minute ago left: nobody else would."""
    for path in SHM.glob("blink-*"):
        _remove_dead_socket(path)
        try:
            fd = open_own(path)
        except (FileNotFoundError, ConfigError):
            continue
        found = os.fstat(fd)
        if time.time() - found.st_ctime > _STALE_SECONDS:
            if path.name.endswith(_RESERVATION):
                if set_lock(fd, fcntl.F_WRLCK):
                    remove_own(path, found.st_ino)
            elif os.pread(fd, len(_MAGIC), 0) == _MAGIC and not is_served(fd):
                remove_own(path, found.st_ino)
        os.close(fd)


def _remove_dead_socket(path: Path) -> None:
    """Delete an engine's socket at which nobody listens any more."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    is_own = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
    if is_own and time.time() - found.st_ctime > _STALE_SECONDS:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                remove_own(path, found.st_ino)


def spare_path(name: str) -> Path:
    """Return a name for a region that only this process knows: before it is published, and if its own is deleted."""
    path = region_path(name)
    return path.with_name(f"{path.name}{_SPARE}{os.getpid()}-{os.urandom(4).hex()}")


def mark_region(fd: int) -> None:
    """Write a new file's first word, by which it is known to be a region."""
    os.pwrite(fd, _MAGIC, 0)


class Reservation:
    """A region's name, kept for this process and its children between two engines."""

    def __init__(self, name: str) -> None:
        """Take the name.

        Raises:
            ConfigError: another server has it, or /dev/shm takes no file.
        """
        self._path = _reservation_path(region_path(name))
        self._fd = self._lock(name)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error

    def _lock(self, name: str) -> int:
        while True:
            fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
            if not set_lock(fd, fcntl.F_WRLCK):
                os.close(fd)
                raise ConfigError(f"another server has the region {name!r}; stop it or give another --region")
            if _is_at(self._path, fd):
                return fd
            os.close(fd)  # its last holder deleted it meanwhile

    def close(self) -> None:
        """Give the name free."""
        remove_own(self._path, os.fstat(self._fd).st_ino)
        os.close(self._fd)


def _reservation_path(path: Path) -> Path:
    return path.with_name(path.name + _RESERVATION)


def _is_own(holder: int | None) -> bool:
    """Say whether a reservation is this process's or its supervisor's."""
    return holder in (os.getpid(), os.getppid())


def _read_holder(path: Path) -> int | None:
    """Return the process that holds a reservation; None if nobody does."""
    try:
        fd = open_own(path)
    except FileNotFoundError:
        return None
    try:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
        digits = os.pread(fd, 20, 0)
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else int(digits) if digits.isdigit() else 0


def _is_at(path: Path, fd: int) -> bool:
    try:
        return path.lstat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False
