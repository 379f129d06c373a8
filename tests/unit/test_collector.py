# SPDX-License-Identifier: Apache-2.0
"""The collector of completions in another machine's memory, over a queue of this process that Python reads for it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from blink.link.rdma.nixl_link import native_read
from blink.region.layout import CQE
from blink.region.native import lib

_ENTRIES = 64
_OFFSET = 4096  # of the queue in the region
_PATIENCE = 120.0  # seconds; reached only by failures


class Queue:
    """A completion queue, and reads of it that may be broken or torn."""

    def __init__(self, head: int = 0) -> None:
        self.entries = np.zeros(_ENTRIES, CQE)
        self.entries["tag"] = head // _ENTRIES & 1  # of the lap before
        self.entries["tag"][: head % _ENTRIES] ^= 1
        self.head = self.tail = head
        self.reads = 0
        self.is_broken = self.is_torn = False
        self.has_read = threading.Event()

    def push(self, count: int = 1) -> None:
        for _ in range(count):
            entry = self.entries[self.tail % _ENTRIES]
            entry["sequence"] = self.tail
            entry["tag"] = self.tail // _ENTRIES + 1 & 1
            self.tail += 1

    def read(self, offset: int, out: npt.NDArray[np.generic]) -> bool:
        start, count = (offset - _OFFSET) // CQE.itemsize, out.nbytes // CQE.itemsize
        entries = self.entries[start : start + count].copy()
        if self.is_torn and self.reads == 0:  # the payload was fetched before it was written, the tag after
            entries["sequence"] = 0
        out[:] = entries.view(np.uint8)
        self.reads += 1
        self.has_read.set()
        return not self.is_broken


class Collected:
    """A collector of a queue, and what it has brought."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._read = native_read(queue.read)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._handle = lib.blink_collector_start(self._read, None, _OFFSET, _ENTRIES, queue.head, self.event_fd, 50)
        self.sequences: list[int] = []

    def expect(self, active: bool = True) -> None:
        lib.blink_collector_expect(self._handle, self._queue.head, active)

    def drain(self, at_most: int = _ENTRIES) -> int:
        out = np.zeros(at_most, CQE)
        count = lib.blink_collector_drain(self._handle, self._queue.head, out.ctypes.data, at_most)
        self.sequences += out[:count]["sequence"].tolist()
        self._queue.head += count
        return count

    def await_sequences(self, tail: int, at_most: int = _ENTRIES) -> None:
        """Drain as an event loop does, until position `tail`."""
        while self._queue.head < tail:
            self.expect()
            assert select.select([self.event_fd], [], [], _PATIENCE)[0], self.sequences
            os.eventfd_read(self.event_fd)
            self.drain(at_most)

    def close(self) -> None:
        lib.blink_collector_stop(self._handle)
        os.close(self.event_fd)


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> Queue:
    return Queue(getattr(request, "param", 0))


@pytest.fixture
def collected(queue: Queue) -> Iterator[Collected]:
    collected = Collected(queue)
    yield collected
    collected.close()


def test_an_entry_counts_when_a_second_read_has_shown_it(queue: Queue, collected: Collected) -> None:
    queue.is_torn = True
    queue.push(3)
    queue.entries["sequence"][:3] += 70
    collected.await_sequences(3)
    assert queue.reads >= 2 and collected.sequences == [70, 71, 72]


@pytest.mark.parametrize("queue", [0, 7, _ENTRIES + 5], indirect=True)
def test_all_arrive_once_and_in_order_over_many_rounds_of_the_queue(queue: Queue, collected: Collected) -> None:
    random, start = np.random.default_rng(3), queue.head
    while queue.tail < start + 1000:
        queue.push(int(random.integers(1, _ENTRIES - (queue.tail - queue.head) + 1)))
        collected.await_sequences(queue.tail - int(random.integers(0, queue.tail - queue.head)))
    collected.await_sequences(queue.tail)
    assert collected.sequences == list(range(start, queue.tail))


def test_what_is_drained_in_pieces_is_signalled_until_all_is_taken(queue: Queue, collected: Collected) -> None:
    queue.push(10)
    collected.await_sequences(10, at_most=3)
    assert collected.sequences == list(range(10))


def test_what_has_come_stays_until_its_reader_has_gone_past_it(queue: Queue, collected: Collected) -> None:
    queue.push(2)
    collected.await_sequences(2)
    queue.head = 0
    assert collected.drain() == 2 and collected.sequences == [0, 1, 0, 1]
    collected.expect()
    assert collected.drain() == 0


def test_what_is_left_is_signalled_though_no_more_is_expected(queue: Queue, collected: Collected) -> None:
    queue.push(10)
    collected.await_sequences(10)
    queue.head = 5
    collected.expect(False)
    assert select.select([collected.event_fd], [], [], _PATIENCE)[0]
    assert collected.drain() == 5


def test_nothing_is_read_unless_completions_are_expected(queue: Queue, collected: Collected) -> None:
    queue.push()
    time.sleep(0.05)
    assert queue.reads == 0
    collected.await_sequences(1)
    assert queue.reads > 0


def test_after_a_read_that_failed_there_is_none(queue: Queue, collected: Collected) -> None:
    queue.is_broken = True
    collected.expect()
    assert queue.has_read.wait(_PATIENCE)
    for _ in range(50):
        collected.expect(False)
        collected.expect(True)
        time.sleep(0.001)
    assert queue.reads == 1 and collected.drain() == 0


_MICROSECOND, _MILLISECOND = 10**3, 10**6


@pytest.mark.parametrize(
    ("silence", "interval", "pause"),
    [
        (0, 50 * _MICROSECOND, 50 * _MICROSECOND),
        (1600 * _MICROSECOND, 50 * _MICROSECOND, 50 * _MICROSECOND),
        (3200 * _MICROSECOND, 50 * _MICROSECOND, 100 * _MICROSECOND),
        (32 * _MILLISECOND, 50 * _MICROSECOND, _MILLISECOND),
        (3600 * 1000 * _MILLISECOND, 50 * _MICROSECOND, _MILLISECOND),
        (320 * _MICROSECOND, 0, 10 * _MICROSECOND),
        (0, 5 * _MILLISECOND, 5 * _MILLISECOND),
    ],
)
def test_without_a_rhythm_a_pause_is_a_32nd_of_the_silence(silence: int, interval: int, pause: int) -> None:
    assert lib.blink_pause_ns(silence, 0, interval) == pause


@pytest.mark.parametrize("step", [_MILLISECOND, 5 * _MILLISECOND, 80 * _MILLISECOND])
def test_in_a_rhythm_looks_are_few_but_frequent_around_the_end_of_a_step(step: int) -> None:
    interval = 50 * _MICROSECOND
    looks = [0]
    while looks[-1] < step:
        looks.append(looks[-1] + lib.blink_pause_ns(looks[-1], step, interval))
    assert looks[-1] - step <= max(interval, step // 64)
    assert len(looks) <= 7 * step // (4 * _MILLISECOND) + 8
    late = lib.blink_pause_ns(3 * step, step, interval)
    alone = lib.blink_pause_ns(3 * step, 0, interval)
    assert 2 * alone // 3 <= late <= alone, "a step that is much later than expected is looked for nearly as without"
    first = 4 * step // 3
    assert lib.blink_pause_ns(first, step, interval) <= max(interval, step // 64), "a first step takes a third longer"


def rhythm_after(*arrivals: tuple[float, float]) -> float:
    """Give the times in ms at which completions were seen and, before, not yet; return what is expected then."""
    longest, least = (np.array([times[i] for times in arrivals]) * _MILLISECOND for i in (0, 1))
    seen, unseen = longest.astype(np.uint64), least.astype(np.uint64)
    return lib.blink_rhythm_ns(seen.ctypes.data, unseen.ctypes.data, len(arrivals), 50 * _MICROSECOND) / _MILLISECOND


def test_a_rhythm_takes_two_steps_and_is_that_of_the_quicker() -> None:
    assert rhythm_after((5.0, 4.95)) == 0
    assert rhythm_after((5.0, 4.95), (5.1, 5.0)) == 4.95
    assert rhythm_after((5.0, 4.95), (5.1, 5.0), (20.0, 19.0)) == 5.0
    assert rhythm_after((20.0, 19.0), (21.0, 20.0), (5.1, 4.8)) == 4.8


def test_steps_that_were_seen_late_end_a_rhythm_and_short_gaps_do_not() -> None:
    slow = (5.0, 4.95), (5.0, 4.95)
    assert rhythm_after(*slow, (0.3, 0.25)) == 4.95
    assert rhythm_after(*slow, (1.0, 0.0)) == 0
    assert rhythm_after(*slow, (1.0, 0.0), (0.3, 0.25)) == 0
