# SPDX-License-Identifier: Apache-2.0
"""Numbers that all frontend workers of a region add up: a scrape reaches any one of them and must see the sum."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blink.errors import ConfigError

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
        self._directory = parent / f"blink.metrics-{os.getuid()}"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._exclusive():
                self._remove_dead_regions()
                self._file = self._create_file()
        except OSError as error:
            raise ConfigError(f"cannot keep metrics in {self._directory}: {error.strerror}") from error
        self._map = mmap.mmap(self._file.fileno(), self._size_bytes)
        self.values = memoryview(self._map).cast("d")

    def sum(self) -> list[float]:
        """Return the sums over all workers of the region."""
        arrays = [path.read_bytes() for path in self._files() if _region_of(path) == self._region]
        columns = [memoryview(data).cast("d") for data in arrays if len(data) == self._size_bytes]
        return [sum(row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """Let go of this worker's file; what it counted stays while siblings live."""
        self._file.close()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.worker"))

    def _create_file(self) -> BinaryIO:
        path = self._directory / f"{self._region}.{os.getpid()}-{os.urandom(4).hex()}.worker"
        file = path.open("x+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(self._size_bytes)
        return file

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


def _region_of(path: Path) -> str:
    return path.name.rsplit(".", 2)[0]


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
