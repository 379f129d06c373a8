# SPDX-License-Identifier: Apache-2.0
"""Numbers that all frontend workers of a region add up: a scrape reaches any one of them and must see the sum."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blink.errors import ConfigError

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


class MetricStore:
    """An array of float64, one file per worker: each worker writes its own and reads them all.

    A worker holds a lock on its file while it lives. The files of dead workers count on, so that sums never fall,
    until no worker of the region lives: then the next one to start, of any region, removes them.
    """

    def __init__(self, region: str, size: int, parent: Path = _SHARED_MEMORY) -> None:
        """Open the store of a region with room for `size` numbers.

        Raises:
            ConfigError: the directory cannot be made or belongs to somebody else.
        """
        self._size_bytes = 8 * size
        self._region = region
        self._is_failing = False
        self._directory = parent / f"blink.metrics-{os.getuid()}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._exclusive():
                self._remove_dead_regions()
                self._open_file(bytes(self._size_bytes))
        except OSError as error:
            raise ConfigError(f"cannot keep metrics in {self._directory}: {error.strerror}") from error

    def restore(self) -> None:
        """Write this worker's file anew if it was deleted or cut."""
        if self._is_whole():
            return
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._exclusive():
                cut = os.fstat(self._file.fileno()).st_size < self._size_bytes  # what was mapped there is gone
                self._open_file(bytes(self._size_bytes) if cut else bytes(self.values.cast("B")))
        except OSError as error:
            if not self._is_failing:
                logger.warning("cannot keep metrics in %s: %s", self._directory, error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False
            logger.warning("the file of this worker's metrics was gone: written anew")

    def sum(self) -> list[float]:
        """Return the sums over all workers of the region."""
        others = (path for path in self._files() if _region_of(path) == self._region and path != self._path)
        arrays = [bytes(self.values.cast("B")), *(_read_if_there(path) for path in others)]
        columns = [memoryview(data).cast("d") for data in arrays if len(data) == self._size_bytes]
        return [sum(row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """Let go of this worker's file; what it counted stays while siblings live."""
        self._file.close()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.worker"))

    def _is_whole(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False
        return found.st_ino == os.fstat(self._file.fileno()).st_ino and found.st_size >= self._size_bytes

    def _open_file(self, content: bytes) -> None:
        """Create this worker's file with its pages: memory that is missing later would end the process."""
        path = self._directory / f"{self._region}.{os.getpid()}-{os.urandom(4).hex()}.worker"
        file = path.open("x+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, self._size_bytes)
            os.pwrite(file.fileno(), content, 0)
            values = memoryview(mmap.mmap(file.fileno(), self._size_bytes)).cast("d")
        except OSError:
            path.unlink(missing_ok=True)
            file.close()
            raise
        self._path, self._file, self.values = path, file, values

    def _remove_dead_regions(self) -> None:
        files = self._files()
        alive = {_region_of(path) for path in files if _is_locked(path)}
        for path in files:
            if _region_of(path) not in alive:
                path.unlink()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with (self._directory / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # removed since the listing
        return b""


def _region_of(path: Path) -> str:
    return path.name.rsplit(".", 2)[0]


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
