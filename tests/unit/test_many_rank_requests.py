# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests of mixed kinds on two ranks: each answer is that of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixed_requests import check_ranks


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_each_answer_is_that_of_one_rank(count: int, tmp_path: Path) -> None:
    check_ranks(tmp_path, count, device="cpu", cpu_threads=2)
