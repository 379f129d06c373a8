# SPDX-License-Identifier: Apache-2.0
"""The collector of the NIXL backend, over a queue in this process instead of the engine's."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from blink.link.rdma.collector import Collector
from blink.region.layout import CQE

_ENTRIES = 64


class Queue:
    """A completion queue, and reads of it that may be broken."""

    def __init__(self) -> None:
        self.entries = np.zeros(_ENTRIES, CQE)
        self.tail = 0
        self.is_broken = False

    def push(self, *, with_payload: bool = True) -> None:
        entry = self.entries[self.tail % _ENTRIES : self.tail % _ENTRIES + 1]
        if with_payload:
            entry["sequence"] = self.tail
        entry["tag"] = self.tail // _ENTRIES + 1 & 1
        self.tail += 1

    def read(self, offset: int, out: np.ndarray[Any, Any]) -> bool:
        start = offset // CQE.itemsize
        out[:] = self.entries[start : start + len(out)]
        return not self.is_broken


@pytest.fixture
def event_fd() -> Iterator[int]:
    event_fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield event_fd
    os.close(event_fd)


def test_an_entry_counts_when_a_second_read_has_shown_it(event_fd: int) -> None:
    queue = Queue()
    collector = Collector(queue.read, 0, _ENTRIES, 0, event_fd, 0)
    queue.push(with_payload=False)  # as a read sees it that fetched the payload before the tag
    queue.push()
    assert collector.collect() is not None
    queue.entries[0]["sequence"] = 7
    queue.push()
    found = collector.collect()
    assert found is not None and found["sequence"].tolist() == [7, 1]
    found = collector.collect()
    assert found is not None and found["sequence"].tolist() == [2]


def test_all_arrive_once_and_in_order_over_many_rounds_of_the_queue(event_fd: int) -> None:
    queue, got = Queue(), list[int]()
    collector = Collector(queue.read, 0, _ENTRIES, 0, event_fd, 0)
    random = np.random.default_rng(3)
    while len(got) < 1000:
        for _ in range(int(random.integers(0, _ENTRIES - (queue.tail - len(got)) + 1))):
            queue.push()
        found = collector.collect()
        assert found is not None
        got += found["sequence"].tolist()
    assert got == list(range(len(got)))


def test_the_thread_signals_and_hands_over_in_pieces(event_fd: int) -> None:
    queue = Queue()
    collector = Collector(queue.read, 0, _ENTRIES, 0, event_fd, 0)
    collector.start()
    for _ in range(10):
        queue.push()
    collector.watch(True)
    out, got = np.zeros(3, CQE), list[int]()
    while len(got) < 10:
        assert select.select([event_fd], [], [], 10)[0]
        os.eventfd_read(event_fd)
        while count := collector.drain(out):
            got += out[:count]["sequence"].tolist()
        collector.watch(True)
    collector.stop()
    assert got == list(range(10))


def test_the_thread_ends_when_a_read_fails(event_fd: int) -> None:
    queue = Queue()
    queue.is_broken = True
    collector = Collector(queue.read, 0, _ENTRIES, 0, event_fd, 0)
    collector.start()
    collector.watch(True)
    collector.join(10)
    assert not collector.is_alive()
