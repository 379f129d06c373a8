# SPDX-License-Identifier: Apache-2.0
"""The scheduler does under a random load what it did when this was recorded: decisions, batches and completions.

Whoever means to change them records anew: `python tests/native/random_load.py tests/native/golden_trace.json`. A change
of how the scheduler stores them is none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Step
from random_load import digest_block

GOLDEN: list[str] = json.loads((Path(__file__).parent / "golden_trace.json").read_text())
SHORT = 2  # blocks of 1,000 passes


def test_the_first_blocks_are_the_recorded_ones() -> None:
    counts: Counter[str] = Counter()
    assert [digest_block(block, counts) for block in range(SHORT)] == GOLDEN[:SHORT]
    # The comparison is worthless unless all kinds of decision were taken.
    absent = ("num_drafts", "draft_tokens", "accepted_tokens", "host_hits", "host_blocks_stored")
    assert {counts.pop(name) for name in absent} == {0}
    assert min(counts.values()) > 0 and counts["LAUNCHED"] > 1400 and counts["num_fast_steps"] > 100, counts


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(len(GOLDEN)))
def test_each_block_is_the_recorded_one(block: int) -> None:
    assert digest_block(block, Counter()) == GOLDEN[block]


@pytest.mark.long
@pytest.mark.parametrize("lanes", [3, 8])
def test_any_number_of_lanes_leaves_the_recorded_trace(lanes: int, lane_steps: Callable[[int], Step]) -> None:
    step = lane_steps(lanes)
    assert [digest_block(block, Counter(), step) for block in range(SHORT)] == GOLDEN[:SHORT]
