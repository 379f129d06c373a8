# SPDX-License-Identifier: Apache-2.0
"""The CPU build under hostile entries by the hundred thousand: the same siege as tests/gpu/test_hostile_sqes.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from blink.engine.state import HostState
from blink.region.layout import BATCH_HEADER, STEP_OUTPUT, StepResult
from blink.region.native import lib
from siege import MAX_MODEL_LEN, besiege, make_region, next_token, place_weights

_PASSES = 256


class HostMachine:
    """A scheduler that is stepped by hand."""

    def __init__(self) -> None:
        self.region = make_region()
        self._state = HostState(self.region)
        self._batch = self._state.array("batch", BATCH_HEADER)
        self._output = self._state.array("output", STEP_OUTPUT)
        self._tokens = self._state.array("tokens", "i4").reshape(-1, MAX_MODEL_LEN)
        names = ("row_slots", "context_lens", "sampled_tokens")
        self._slots, self._lens, self._sampled = (self._state.array(name, "i4") for name in names)
        self._weights = place_weights(MAX_MODEL_LEN)

    def advance(self) -> None:
        for _ in range(_PASSES):
            if lib.blink_step(self._state.address, time.monotonic_ns()) == StepResult.LAUNCHED:
                self._compute()

    def check(self) -> None:
        broken = lib.blink_check_integrity(self._state.address)
        assert broken is None, broken.decode()

    def _compute(self) -> None:
        rows = int(self._batch[0]["num_rows"])
        lens = self._lens[:rows].astype(np.int64)
        is_read = np.arange(MAX_MODEL_LEN) < lens[:, None]
        totals = (self._tokens[self._slots[:rows]] * self._weights * is_read).sum(1)
        self._sampled[:rows] = next_token(totals, lens)
        self._output[0]["done_step"] = self._batch[0]["step"]


@contextmanager
def host_machine() -> Iterator[HostMachine]:
    machine = HostMachine()
    try:
        yield machine
    finally:
        machine.region.remove()
        machine.region.close()


def check_counts(counts: dict[str, int], num_entries: int) -> None:
    """The run is worthless unless it went through what it is for."""
    assert counts["sent"] >= num_entries and counts["bad"] > num_entries / 5
    assert counts["rejected"] > num_entries / 2 and counts["started"] > num_entries / 1000
    assert counts["answered"] > num_entries / 10_000


def test_hostile_entries_of_several_frontends_harm_nobody() -> None:
    with host_machine() as machine:
        counts = besiege(machine, 150_000)
    check_counts(counts, 150_000)
    assert counts["losses"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_million_hostile_entries_of_several_frontends_harm_nobody() -> None:
    with host_machine() as machine:
        counts = besiege(machine, 10_000_000)
    check_counts(counts, 10_000_000)
