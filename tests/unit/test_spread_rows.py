# SPDX-License-Identifier: Apache-2.0
"""How an all-reduce spreads few rows over clusters of blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import blink
from blink.kernels.gpu.comm import spread
from blink.kernels.gpu.comm.boxes import MOST_BLOCKS

LINES = (16, 512, 720, 1024, 1280, 2048, 4096)  # of a row


@pytest.mark.parametrize("lines", LINES)
def test_each_line_has_a_thread_and_all_blocks_run_at_once(lines: int) -> None:
    for rows in range(1, 100):
        chosen = spread.choose_spread(rows, lines)
        if chosen is None:
            assert rows > MOST_BLOCKS or lines > 4 * 2 * spread.THREADS
            continue
        assert (
            chosen.cluster * chosen.lines * spread.THREADS
            >= lines
            > chosen.cluster * (chosen.lines - 1) * spread.THREADS
        )
        assert rows * chosen.cluster * spread.THREADS <= MOST_BLOCKS * 512


def test_few_rows_have_a_line_a_thread_and_more_rows_smaller_clusters() -> None:
    assert spread.choose_spread(1, 1024) == spread.Spread(4, 1)
    assert spread.choose_spread(16, 2048) == spread.Spread(8, 1)
    assert spread.choose_spread(32, 2048) == spread.Spread(4, 2)
    assert spread.choose_spread(64, 2048) == spread.Spread(2, 4)
    assert spread.choose_spread(65, 2048) is None
    assert spread.choose_spread(1, 8193) is None


def test_blocks_have_as_many_threads_as_the_kernel() -> None:
    words = (Path(blink.__file__).parent / "csrc/kernels/comm/words.cuh").read_text()
    assert re.findall(r"kSpreadThreads = (\d+)", words) == [str(spread.THREADS)]
