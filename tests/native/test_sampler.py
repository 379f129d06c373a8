# SPDX-License-Identifier: Apache-2.0
"""csrc/sampler, by the native library and by groups of many lanes, against the plain PyTorch oracle on random rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.cpu import sampling
from conftest import Compile
from sampling_rows import Sample, check_rows


@pytest.fixture(scope="module")
def by_lanes(compile_native: Compile) -> Callable[[int, int], Sample]:
    """Return make(blocks, lanes): sampling by that group."""
    library = ctypes.CDLL(str(compile_native("lane_sampling.cpp", "-O1", "-shared", "-fPIC")))

    def make(blocks: int, lanes: int) -> Sample:
        def sample(logits: Tensor, batch: Batch) -> None:
            rows = sampling.describe_rows(logits, batch, logits.shape[0])
            library.sample_by_lanes(ctypes.c_void_p(rows.ctypes.data), blocks, lanes)

        return sample

    return make


def sample_natively(logits: Tensor, batch: Batch) -> None:
    """Sample as the CPU engine does."""
    sampling.sample(logits, batch, logits.shape[0])


def test_one_lane_gives_the_oracles_tokens_and_logprobs() -> None:
    for seed in (*range(13), 1037, 2143):  # the last two hide what is not finite
        check_rows(sample_natively, seed)


@pytest.mark.parametrize(("blocks", "lanes", "count"), [(1, 32, 5), (1, 1024, 1), (8, 1024, 1)])
def test_groups_of_many_lanes_give_the_same(
    by_lanes: Callable[[int, int], Sample], blocks: int, lanes: int, count: int
) -> None:
    for seed in range(100, 100 + count):
        check_rows(by_lanes(blocks, lanes), seed)


@pytest.mark.long
def test_ten_thousand_rows_of_one_lane() -> None:
    for seed in range(1000, 1500):
        check_rows(sample_natively, seed)


@pytest.mark.long
@pytest.mark.parametrize(("blocks", "lanes", "count"), [(1, 32, 200), (1, 1024, 20), (8, 1024, 20)])
def test_thousands_of_rows_of_many_lanes(
    by_lanes: Callable[[int, int], Sample], blocks: int, lanes: int, count: int
) -> None:
    for seed in range(2000, 2000 + count):
        check_rows(by_lanes(blocks, lanes), seed)
