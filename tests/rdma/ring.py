# SPDX-License-Identifier: Apache-2.0
"""Requests through a queue pair whose answers say whether anything was torn, lost or repeated on the way."""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from typing import cast

import numpy as np

from blink.errors import OverloadedError
from blink.link.base import Link
from blink.link.queue_pair import QueuePair, Submission
from blink.link.rdma.link import RdmaLink
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams
from counting_engine import MAX_MODEL_LEN, VOCAB, answer

_MAX_LIVE = 32
_MAX_ANSWER = 6
_PATIENCE = 300.0  # seconds without any completion


class _TailFirst:
    """A link with the mistake that the protocol rules out: the tail goes first, the prompt last."""

    def __init__(self, link: RdmaLink) -> None:
        self._link = link
        self._held: list[tuple[int, bytes]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def write(self, offset: int, data: bytes) -> None:
        if offset >= self._link.addresses.arena:
            self._held.append((offset, data))
        else:
            self._link.write(offset, data)

    def store_word(self, offset: int, value: int) -> None:
        self._link.store_word(offset, value)
        while self._held:
            self._link.write(*self._held.pop())


def tail_first(link: RdmaLink) -> Link:
    """Return a link over `link` that makes this mistake."""
    return cast("Link", _TailFirst(link))


class Inspector:
    """Own the sequences of one queue pair and check every completion."""

    def __init__(self, pair: QueuePair, link: Link) -> None:
        self._pair = pair
        self._link = link
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._random = np.random.default_rng(7)
        self._expected: dict[int, list[int]] = {}
        self._got: dict[int, list[int]] = {}
        self.faults: Counter[str] = Counter()
        self.answered = 0
        link.notify(self._event_fd, pair.head, 50)

    def run(self, num_requests: int) -> None:
        """Send requests and check their answers until all are answered or nothing comes any more."""
        sent, renewed, last = 0, 0.0, time.monotonic()
        while self.answered < num_requests:
            while sent < num_requests and len(self._expected) < _MAX_LIVE and self._submit():
                sent += 1
            self._link.expect(self._pair.head, True)
            if select.select([self._event_fd], [], [], 0.1)[0]:
                os.eventfd_read(self._event_fd)
            now = time.monotonic()
            if self._check():
                last = now
            if now - renewed > 0.25:
                self._pair.renew_lease()
                renewed = now
            if now - last > _PATIENCE or self._link.loss():
                self.faults["lost"] += len(self._expected) + num_requests - sent
                break
        self._link.expect(self._pair.head, False)

    def _submit(self) -> bool:
        length = int(self._random.integers(1, MAX_MODEL_LEN - _MAX_ANSWER))
        prompt = self._random.integers(0, VOCAB, length).astype(np.int32)
        num_tokens = int(self._random.integers(1, _MAX_ANSWER))
        try:
            sequence = self._pair.submit(Submission(prompt, (), 0, b""), SamplingParams(max_tokens=num_tokens))
        except OverloadedError:
            return False
        self._expected[sequence] = answer(prompt.tolist(), num_tokens)
        self._got[sequence] = []
        return True

    def _check(self) -> int:
        completions = self._pair.drain()
        for completion in completions:
            sequence, kind = int(completion["sequence"]), int(completion["kind"])
            if sequence not in self._expected:
                self.faults["repeated"] += 1
                continue
            if kind == CqeKind.TOKEN:
                if int(completion["index"]) != len(self._got[sequence]):
                    self.faults["out of order"] += 1
                self._got[sequence].append(int(completion["token"]))
            if completion["finish_reason"]:
                self._finish(sequence)
        return len(completions)

    def _finish(self, sequence: int) -> None:
        if self._got.pop(sequence) != self._expected.pop(sequence):
            self.faults["wrong"] += 1
        self.answered += 1
