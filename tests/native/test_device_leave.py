# SPDX-License-Identifier: Apache-2.0
"""The host has a device to itself while its scheduler is held: this goes on afterwards, whatever happened meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blink.engine import device_leave
from blink.engine.device_leave import without_scheduler
from blink.engine.hold import Hold
from blink.errors import EngineUnavailableError
from blink.region.layout import Drop
from harness import expected_tokens, run_until_finished, running, small_config, submit
from processes import wait_for
from resident import Resident

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture
def resident() -> Iterator[Resident]:
    with running(small_config()) as harness:
        resident = Resident(harness)
        yield resident
        resident.end()


def test_a_sequence_outlasts_the_time_in_which_the_host_has_the_device(resident: Resident) -> None:
    harness, pair = resident.harness, resident.harness.frontend()
    sequence = submit(harness, pair, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(5):
        harness.step()
    resident.start()
    region, hold = harness.region, Hold(harness.region)
    hold.begin(Drop.NOTHING)
    with without_scheduler(region, resident):
        assert resident.has_ended()
        before, steps = region.heartbeat(), harness.statistic("num_steps")
        wait_for(lambda: region.heartbeat() >= before + 3, 30)
        assert harness.statistic("num_steps") == steps
    assert resident.starts == 2 and not resident.has_ended() and region.control_word("leave") == 0
    hold.end()
    resident.end()
    run_until_finished(harness, resident.inbox, [pair], [sequence])
    assert resident.inbox.tokens(sequence) == expected_tokens(PROMPT, 12, harness.vocab_size)


def test_the_scheduler_comes_back_after_an_error_of_the_host(resident: Resident) -> None:
    resident.start()
    hold = Hold(resident.harness.region)
    hold.begin(Drop.NOTHING)
    with pytest.raises(ZeroDivisionError), without_scheduler(resident.harness.region, resident):
        print(1 // 0)
    assert resident.starts == 2 and not resident.has_ended()
    hold.end()


def test_a_scheduler_that_is_not_held_does_not_leave(resident: Resident, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_leave, "_LEAVE_SECONDS", 0.2)
    resident.start()
    with pytest.raises(EngineUnavailableError, match="leave"), without_scheduler(resident.harness.region, resident):
        raise AssertionError
    assert resident.starts == 1 and not resident.has_ended()
