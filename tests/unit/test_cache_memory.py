# SPDX-License-Identifier: Apache-2.0
"""The memory of a KV cache on a CPU: zeros of any type, taken as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blink.formats.fp8 import FP8
from blink.kernels.layer_cache import allocate_cache

CPU = torch.device("cpu")
_PAGE = 4096
_SHAPE = (2, 1024, 16, 4, 256)  # 64 MiB in 16 bits


def count_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8], ids=str)
def test_a_cache_is_zeros_that_can_be_written(dtype: torch.dtype) -> None:
    cache = allocate_cache((2, 3, 16, 4), dtype, CPU)
    assert (cache.shape, cache.dtype, cache.is_contiguous()) == ((2, 3, 16, 4), dtype, True)
    assert not cache.float().any()
    cache[1, 2].fill_(1)
    assert cache.float().sum() == 64


def test_a_cache_without_blocks_is_empty() -> None:
    assert allocate_cache((3, 0, 16), torch.float16, CPU).shape == (3, 0, 16)


def test_memory_is_taken_as_it_is_written() -> None:
    cache = allocate_cache(_SHAPE, torch.float16, CPU)
    before = count_resident()
    cache[:, :512] = 1
    taken = count_resident() - before
    assert 0.9 * cache.nbytes / 2 < taken < 0.7 * cache.nbytes


def test_its_memory_is_given_back() -> None:
    cache = allocate_cache(_SHAPE, torch.float16, CPU).fill_(1)
    before, size = count_resident(), cache.nbytes
    del cache
    assert before - count_resident() > 0.9 * size
