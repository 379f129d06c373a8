# SPDX-License-Identifier: Apache-2.0
"""Numbers that all frontend workers of a region add up: a scrape reaches any one of them and must see the sum."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from pathlib import Path

from blink.errors import ConfigError
from blink.region.files import open_own

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_ENDING = ".worker"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker's numbers."""

    pid: int
    is_alive: bool
    values: memoryview[float]


class WorkerFiles:
    """What the workers of a region have written, for whoever may read this user's files."""

    def __init__(self, region: str, size: int, parent: Path = _SHARED_MEMORY) -> None:
        self.directory = parent / f"blink.metrics-{os.geteuid()}"
        self.size_bytes = 8 * size
        self.region = region
        self._known: dict[str, _WorkerFile] = {}  # those of the last look

    def all(self) -> list[Path]:
        """Return the files of all workers of all regions."""
        return [self.directory / name for name in sorted(_names_in(self.directory))]

    def read(self, except_path: Path | None = None) -> list[Worker]:
        """Read the numbers of the region's workers, living and dead."""
        own = except_path.name if except_path is not None else ""
        names = [name for name in _names_in(self.directory) if _region_of(name) == self.region and name != own]
        known, self._known = self._known, {}
        for name in sorted(names):
            file = known.pop(name, None) or _WorkerFile.open(self.directory / name)
            if file is not None:
                self._known[name] = file
        for file in known.values():
            file.close()  # it was deleted
        return [worker for file in self._known.values() if (worker := file.read(self.size_bytes)) is not None]

    def count_values(self) -> int:
        """Return how many numbers a living worker of the region has; 0 if none lives."""
        paths = [path for path in self.all() if _region_of(path.name) == self.region and _is_alive(path)]
        return max((path.stat().st_size // 8 for path in paths), default=0)

    def close(self) -> None:
        """Let go of the files."""
        while self._known:
            self._known.popitem()[1].close()


class _WorkerFile:
    """The file of another worker, kept open from one look to the next: to open it takes longer than to read it."""

    @classmethod
    def open(cls, path: Path) -> _WorkerFile | None:
        """Open a worker's file; none if it was removed since the listing, or is no worker's."""
        try:
            return cls(path.name, _open(path, os.O_RDONLY))
        except (OSError, ConfigError):
            return None

    def __init__(self, name: str, fd: int) -> None:
        self._pid = _pid_of(name)
        self._fd = fd
        self._is_alive = True

    def read(self, size_bytes: int) -> Worker | None:
        """Read its numbers; none if they are not this many."""
        data = os.pread(self._fd, size_bytes + 1, 0)
        if len(data) != size_bytes:
            return None
        # A file is locked before it is whole, and who is dead stays it.
        self._is_alive = self._is_alive and _is_locked(self._fd)
        return Worker(self._pid, self._is_alive, memoryview(data).cast("d"))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


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
        self._files = WorkerFiles(region, size, parent)
        self._size_bytes = self._files.size_bytes
        self._is_failing = False
        self._directory = self._files.directory
        try:
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
            with self._exclusive():
                cut = os.fstat(self._file.fileno()).st_size < self._size_bytes  # what was mapped there is gone
                self._open_file(bytes(self._size_bytes) if cut else bytes(self.values.cast("B")))
        except (OSError, ConfigError) as error:
            if not self._is_failing:
                logger.warning("cannot keep metrics in %s: %s", self._directory, error)
            self._is_failing = True
        else:
            self._is_failing = False
            logger.warning("the file of this worker's metrics was gone: written anew")

    def workers(self) -> list[Worker]:
        """Return the numbers of all workers of the region."""
        return [Worker(os.getpid(), True, self.values), *self._files.read(except_path=self._path)]

    def sum(self) -> list[float]:
        """Return the sums over all workers of the region."""
        return add_up(self.workers())

    def close(self) -> None:
        """Let go of this worker's file, and of its siblings'; what it counted stays while they live."""
        self._file.close()
        self._files.close()

    def _is_whole(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False
        return found.st_ino == os.fstat(self._file.fileno()).st_ino and found.st_size >= self._size_bytes

    def _open_file(self, content: bytes) -> None:
        """Create this worker's file with its pages: memory that is missing later would end the process."""
        path = self._directory / f"{self._files.region}.{os.getpid()}-{os.urandom(4).hex()}.worker"
        file = os.fdopen(_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b")
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
        files = self._files.all()
        alive = {_region_of(path.name) for path in files if _is_alive(path)}
        for path in files:
            if _region_of(path.name) not in alive:
                path.unlink()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        _check_own(self._directory)
        with os.fdopen(_open(self._directory / "lock", os.O_RDWR | os.O_CREAT), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def add_up(workers: Sequence[Worker]) -> list[float]:
    """Return the sum of each number over the workers."""
    sums: list[float] = []
    for worker in workers:
        values = [*worker.values]
        sums = [*map(add, sums, values)] if sums else values
    return sums


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


def _names_in(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.name.endswith(_ENDING)]
    except FileNotFoundError:
        return []


def _region_of(name: str) -> str:
    return name.rsplit(".", 2)[0]


def _pid_of(name: str) -> int:
    return int(name.rsplit(".", 2)[1].partition("-")[0])


def _is_locked(fd: int) -> bool:
    """Say whether a living worker writes this file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _is_alive(path: Path) -> bool:
    """Say whether a living worker writes this file; of one that is gone by now, that none does."""
    try:
        with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
            return _is_locked(file.fileno())
    except (OSError, ConfigError):
        return False
