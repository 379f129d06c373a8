# SPDX-License-Identifier: Apache-2.0
"""Requests of mixed kinds on two and eight ranks: each answer is that of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixed_requests import check_ranks


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_each_answer_is_that_of_one_rank(count: int, tmp_path: Path) -> None:
    check_ranks(tmp_path, count, device="cpu", cpu_threads=2)


def test_each_answer_of_eight_ranks_is_that_of_one(tmp_path: Path) -> None:
    """More than key-value heads: two ranks have copies of one."""
    check_ranks(tmp_path, 24, ranks=8, device="cpu", cpu_threads=8)
