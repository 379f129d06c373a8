# SPDX-License-Identifier: Apache-2.0
"""The device scheduler under ten million hostile entries: the same siege as tests/native/test_siege.py."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from blink.region.layout import CONSTANTS, StepKind
from siege import MAX_MODEL_LEN, besiege, make_region, next_token, place_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

_PASSES = CONSTANTS["launches_per_window"]  # each may launch a step, and CUDA permits no more of them
_HOSTILE_PAIRS = 15  # of each of which a pass takes 16 entries
_NUM_ENTRIES = int(os.environ.get("BLINK_HOSTILE_SQES", "10000000"))


class DeviceMachine:
    """A scheduler on the GPU that runs some hundred passes at a time."""

    def __init__(self) -> None:
        from blink.engine.device_scheduler import DeviceScheduler, DeviceState

        self.region = make_region(_HOSTILE_PAIRS)
        device = torch.device("cuda", 0)
        self._state = DeviceState(self.region, device)
        self._scheduler = DeviceScheduler(self._state)
        self._tokens = self._state.array("tokens", torch.int32).view(-1, MAX_MODEL_LEN)
        names = ("row_slots", "context_lens", "sampled_tokens")
        self._slots, self._lens, self._sampled = (
            self._state.array(StepKind.WHOLE.array(name), torch.int32) for name in names
        )
        self._weights = torch.from_numpy(place_weights(MAX_MODEL_LEN)).to(device)
        self._places = torch.arange(MAX_MODEL_LEN, device=device)
        self._compute()
        torch.cuda.synchronize()
        for index in reversed(range(int(self.region.geometry["num_graphs"]))):
            self._scheduler.capture(index, self._compute)

    def advance(self) -> None:
        self._scheduler.run_passes(_PASSES)

    def check(self) -> None:
        """Leave the invariants to the CPU build: their check reads the state's memory, which is the GPU's."""

    def close(self) -> None:
        """Free what the device has of the region."""
        torch.cuda.synchronize()
        self._state.close(self.region)

    def _compute(self) -> None:
        """Sample for all rows that a batch may have: those beyond it hold older ones, which nobody reads."""
        is_read = self._places < self._lens[:, None]
        totals = (self._tokens[self._slots.long()].long() * self._weights * is_read).sum(1)
        self._sampled.copy_(next_token(totals, self._lens.long()))


@contextmanager
def device_machine() -> Iterator[DeviceMachine]:
    machine = DeviceMachine()
    try:
        yield machine
        machine.close()
    finally:
        machine.region.remove()
        machine.region.close()


def test_ten_million_hostile_entries_of_several_frontends_harm_nobody() -> None:
    started = time.monotonic()
    with device_machine() as machine:
        counts = besiege(machine, _NUM_ENTRIES)
    print(f"{counts} in {time.monotonic() - started:.0f} s")
    assert counts["sent"] >= _NUM_ENTRIES and counts["bad"] > _NUM_ENTRIES / 5
    assert counts["rejected"] > _NUM_ENTRIES / 2 and counts["started"] > _NUM_ENTRIES / 1000
    assert counts["answered"] > _NUM_ENTRIES / 50_000
