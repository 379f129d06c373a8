# SPDX-License-Identifier: Apache-2.0
"""The kernels by which ranks of GPUs exchange numbers, on a host's threads: every sum compared, and no data race."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Compile
from test_native_programs import build, run

pytestmark = pytest.mark.timeout(600)
WORDS = ("comm/words.cuh", "common/ptx.cuh")
# Sums of 9 sizes in one shot and in two on all ranks, rows with a norm of 5 widths, and 46 rows that are joined on the
# first.
NUMBERS, WIDTHS, ROWS, COLUMNS = 2 * (1 + 2 + 63 + 64 + 65 + 96 + 97 + 1000 + 2100), 2 + 126 + 128 + 200 + 384, 46, 7


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the flags by which a host's words stand for a GPU's."""
    folder = tmp_path_factory.mktemp("words")
    for name in WORDS:
        path = folder / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#pragma once\n#include "gpu_ranks.h"\n')
    return (f"-iquote{folder}", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-unused-parameter")


def count_compared(ranks: int, blocks: int, steps: int) -> int:
    return steps * (ranks * (NUMBERS + blocks // 2 * WIDTHS) + ROWS * (ranks * COLUMNS - 2))


@pytest.mark.parametrize(("ranks", "blocks", "steps"), [(2, 2, 2), pytest.param(4, 3, 20, marks=pytest.mark.long)])
def test_exchanges_of_all_kinds_are_right_in_any_order(
    compile_native: Compile, flags: tuple[str, ...], ranks: int, blocks: int, steps: int
) -> None:
    program: Path = compile_native("rank_exchanges.cpp", *flags)
    for seed in range(1 if steps < 9 else 4):
        counts = run(program, ranks, blocks, steps, seed, -1)
        assert counts == {"wrong": 0, "compared": count_compared(ranks, blocks, steps), "lost": ranks, "told": 0}


@pytest.mark.parametrize(("ranks", "steps"), [(3, 1), pytest.param(8, 4, marks=pytest.mark.long)])
def test_no_number_is_read_before_it_is_stored(
    compile_native: Compile, flags: tuple[str, ...], ranks: int, steps: int
) -> None:
    program = build(compile_native, "rank_exchanges.cpp", "thread", *flags)
    counts = run(program, ranks, 2, steps, 3, -1)
    assert counts["wrong"] == 0 and counts["compared"] == count_compared(ranks, 2, steps)


def test_a_rank_that_stops_is_named_on_all_others(compile_native: Compile, flags: tuple[str, ...]) -> None:
    counts = run(compile_native("rank_exchanges.cpp", *flags), 3, 2, 3, 0, 1)
    assert (counts["lost"], counts["told"]) == (3, 2)
