# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept for later requests, in one SQLite file that all workers of a region share.

A client's next request may reach any worker, and another process reads large bodies: so the file is the memory that
they share. Who does not know the owner of a response, the digest of an API key, does not find it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blink.api.serving.body import MAX_ID_CHARS
from blink.errors import BlinkError, ConfigError, NotFoundError, OverloadedError
from blink.region.files import open_own

_SHM = Path("/dev/shm")
# For another worker's write, which takes less than a thousandth: on the event loop, and in the thread that tries again.
_WAIT_SECONDS, _PATIENCE_SECONDS = 0.05, 10.0
_OPEN_TRIES, _OPEN_SECONDS = 100, 0.05
IN_PROGRESS = "in_progress"  # the status of a response that is being made
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS responses (number INTEGER PRIMARY KEY AUTOINCREMENT, owner BLOB, id TEXT, "
    "status TEXT, size INTEGER, input BLOB, response BLOB, UNIQUE (owner, id))",
    "CREATE INDEX IF NOT EXISTS sizes ON responses (owner, number, size)",  # read without what is large
)

_LATER = ThreadPoolExecutor(1, "responses")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept; the oldest response goes first."""

    path: str
    max_responses: int
    max_bytes: int
    max_share: float  # of both, for one API key


@dataclass(frozen=True, slots=True)
class Kept:
    """One response. input: all items that it answers, as a JSON list."""

    status: str
    input: bytes
    response: bytes


class ResponseStore:
    """Keep responses by their owners and ids. Each call is one short transaction.

    Raises of all: OverloadedError, where another worker is at it for long, or there is no room.
    """

    def __init__(self, limits: StoreLimits, wait: float = _WAIT_SECONDS) -> None:
        self.limits = limits
        # The file is made by who opens it first, for this user alone; SQLite's files beside it follow its mode.
        try:
            os.close(open_own(Path(limits.path), os.O_RDWR | os.O_CREAT))
            self._db = sqlite3.connect(limits.path, timeout=wait, isolation_level=None)
            self._db.execute("PRAGMA synchronous=OFF")
            for tries_left in reversed(range(_OPEN_TRIES)):
                with suppress(*([sqlite3.OperationalError] if tries_left else [])):
                    self._db.execute("PRAGMA journal_mode=WAL")  # does not wait by itself for a worker that does it too
                    for statement in _SCHEMA:
                        self._db.execute(statement)
                    break
                time.sleep(_OPEN_SECONDS)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"responses cannot be kept in {limits.path}: {error}") from error

    def put(self, owner: bytes, name: str, kept: Kept) -> None:
        """Keep a response, and forget the oldest ones that it leaves no room for."""
        size = len(kept.input) + len(kept.response)
        values = (owner, name, kept.status, size, kept.input, kept.response)
        with self._transaction():
            self._run(
                "INSERT OR REPLACE INTO responses (owner, id, status, size, input, response) VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )
            if owner:
                self._trim("WHERE owner = ?", (owner,), self.limits.max_share)
            self._trim("", (), 1.0)

    def settle(self, owner: bytes, name: str, status: str, response: bytes) -> bool:
        """End a response that is in progress; say whether it still was, and was not deleted."""
        with self._transaction():
            changed = self._run(
                "UPDATE responses SET status = ?, response = ?, size = length(input) + ? "
                "WHERE owner = ? AND id = ? AND status = ?",
                (status, response, len(response), owner, name, IN_PROGRESS),
            )
        return changed.rowcount > 0

    def get(self, owner: bytes, name: str) -> Kept | None:
        """Return a response of this owner."""
        row = self._run("SELECT status, input, response FROM responses WHERE owner = ? AND id = ?", (owner, name))
        return next((Kept(*values) for values in row), None)

    def is_in_progress(self, owner: bytes, name: str) -> bool:
        """Say whether a response is being made: it was neither cancelled nor deleted."""
        found = self._run(
            "SELECT 1 FROM responses WHERE owner = ? AND id = ? AND status = ?", (owner, name, IN_PROGRESS)
        )
        return next(found, None) is not None

    def delete(self, owner: bytes, name: str) -> bool:
        """Forget a response; say whether there was one."""
        return self._run("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, name)).rowcount > 0

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise OverloadedError(f"The store of responses is not available ({error}). Retry later.") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def _trim(self, where: str, values: tuple[bytes, ...], share: float) -> None:
        """Delete the oldest until what is left is within a share of the limits."""
        most, size = max(1, int(self.limits.max_responses * share)), int(self.limits.max_bytes * share)
        ((count, total),) = self._run(f"SELECT count(*), total(size) FROM responses {where}", values)
        if count <= most and total <= size:
            return
        oldest = self._run(f"SELECT number, size FROM responses {where} ORDER BY number", values)
        last = 0
        for number, freed in oldest:
            if count <= most and total <= size:
                break
            last, count, total = number, count - 1, total - freed
        oldest.close()
        self._run(f"DELETE FROM responses {where or 'WHERE 1'} AND number <= ?", (*values, last))


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores one response. input: all items that it answers, as a JSON list."""

    store: ResponseStore
    owner: bytes
    name: str
    input: bytes

    def begin(self, response: bytes) -> None:
        """Store a response that is still to be made.

        Raises:
            OverloadedError: that is not possible now.
        """
        self.store.put(self.owner, self.name, Kept(IN_PROGRESS, self.input, response))

    def settle(self, status: str, response: bytes) -> None:
        """Store what has become of a response that was begun, unless its client has cancelled or deleted it."""
        self._try(lambda store: store.settle(self.owner, self.name, status, response))

    def keep(self, status: str, response: bytes) -> None:
        """Store a response that is made."""
        self._try(lambda store: store.put(self.owner, self.name, Kept(status, self.input, response)))

    @property
    def is_wanted(self) -> bool:
        """Say whether a response that was begun is still waited for."""
        try:
            return self.store.is_in_progress(self.owner, self.name)
        except BlinkError:
            return True

    def _try(self, write: Callable[[ResponseStore], object]) -> None:
        """Write now, before the client asks for it; or later in a thread, as others must not wait meanwhile."""
        try:
            write(self.store)
        except OverloadedError:
            _LATER.submit(self._insist, write)

    def _insist(self, write: Callable[[ResponseStore], object]) -> None:
        try:
            write(open_store(self.store.limits, _PATIENCE_SECONDS))
        except BlinkError as error:
            logger.warning("response %s is not stored: %s", self.name, error.message)


class StoreLease:
    """A worker's hold on its region's file: with the last worker the file goes, unless it has a place of its own."""

    def __init__(self, region: str, parent: Path = _SHM) -> None:
        """Take hold of it; what the workers of a server before have left is deleted.

        Raises:
            ConfigError: the folder cannot be made, or is not this user's alone.
        """
        folder = parent / f"blink.responses-{os.geteuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            self._lock = open_own(folder / f"{region}.lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(f"{folder} is not this user's alone")
        self.path = folder / f"{region}.sqlite"
        self._delete_if_alone()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it."""
        self._delete_if_alone()
        os.close(self._lock)

    def _delete_if_alone(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        for ending in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + ending).unlink(missing_ok=True)


@cache
def open_store(limits: StoreLimits, wait: float = _WAIT_SECONDS) -> ResponseStore:
    """Return this process's way to the store: one for each thread, by how long it waits for another's write."""
    return ResponseStore(limits, wait)


def find_kept(limits: StoreLimits, owner: bytes, name: str, param: str | None = None) -> Kept:
    """Return a response of this owner.

    Raises:
        NotFoundError: there is none of this name, or none any more, or it is somebody else's.
    """
    kept = open_store(limits).get(owner, name)
    if kept is None:
        raise NotFoundError(f"Response with id '{name[:MAX_ID_CHARS]}' not found.", param)
    return kept
