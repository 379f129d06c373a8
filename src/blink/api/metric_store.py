# SPDX-License-Identifier: Apache-2.0
"""Numbers that all frontend workers of a region add up: a scrape reaches any one of them and must see the sum."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from blink.errors import ConfigError
from blink.region.files import open_own

_SHARED_MEMORY = Path("/dev/shm")


class MetricStore:
    """An array of float64, one file per worker: each worker writes its own and reads them all.

    A worker holds a lock on its file while it lives. The files of dead workers count on, so that sums never fall,
    until no worker of the region lives: then the next one to start, of any region, removes them.
    """

    def __init__(self, region: str, size: int, parent: Path = _SHARED_MEMORY) -> None:
        """Open the store of a region with room for `size` numbers.

        Raises:
            ConfigError: the directory cannot be made, has no room, or is not this user's alone.
        """
        self._size_bytes = 8 * size
        self._region = region
        self._directory = parent / f"blink.metrics-{os.geteuid()}"
        self._path = self._directory / f"{region}.{os.getpid()}-{os.urandom(4).hex()}.worker"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            _check_own(self._directory)
            with self._exclusive():
                self._remove_dead_regions()
                self._file = self._create_file()
        except OSError as error:
            raise ConfigError(f"cannot keep metrics in {self._directory}: {error.strerror}") from error
        self._map = mmap.mmap(self._file.fileno(), self._size_bytes)
        self.values = memoryview(self._map).cast("d")

    def sum(self) -> list[float]:
        """Return the sums over all workers of the region whose files are there and whole, and this one's numbers."""
        others = [path for path in self._files() if _region_of(path) == self._region and path != self._path]
        columns = [self.values]
        for path in others:
            with suppress(OSError, ConfigError):  # deleted since, or no file of a worker
                data = _read(path)
                if len(data) == self._size_bytes:
                    columns.append(memoryview(data).cast("d"))
        return [sum(row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """Let go of this worker's file; what it counted stays while siblings live."""
        self._file.close()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.worker"))

    def _create_file(self) -> BinaryIO:
        file = os.fdopen(_open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            os.posix_fallocate(file.fileno(), 0, self._size_bytes)  # a page that is not there would be fatal later
        except OSError:
            self._path.unlink()
            raise
        return file

    def _remove_dead_regions(self) -> None:
        files = self._files()
        alive = {_region_of(path) for path in files if _is_locked(path)}
        for path in files:
            if _region_of(path) not in alive:
                path.unlink()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with os.fdopen(_open(self._directory / "lock", os.O_RDWR | os.O_CREAT), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _region_of(path: Path) -> str:
    return path.name.rsplit(".", 2)[0]


def _check_own(directory: Path) -> None:
    """Refuse a directory into which somebody else could put files, or a link to one."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"metrics are not kept in {directory}: it must be a directory of this user (id {os.geteuid()}) to which "
            f"nobody else may write, but belongs to user {found.st_uid} and has mode {stat.filemode(found.st_mode)}"
        )


def _open(path: Path, flags: int) -> int:
    return open_own(path, flags, forbidden=0)  # the directory keeps others out


def _read(path: Path) -> bytes:
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _is_locked(path: Path) -> bool:
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
