# SPDX-License-Identifier: Apache-2.0
"""The threads of the native kernels, csrc/cpu/thread_pool.h: as many as PyTorch has, which sleep meanwhile."""

from __future__ import annotations

import threading
from functools import cache

import torch

from blink.region.native import lib

_own = threading.local()


def use_own_pool(number: int) -> None:
    """Let this thread use a pool of its own, by number, which threads of other numbers do not wait for."""
    _own.number = number


def find_thread_pool() -> int:
    """Return the address of a pool that with its caller has as many threads as PyTorch uses."""
    return _start(torch.get_num_threads(), getattr(_own, "number", 0))


def is_in_use() -> bool:
    """Whether GEMMs run on these threads. Where none do, PyTorch's are awake, and both would want the same cores."""
    return _start.cache_info().currsize > 0


def find_helpers() -> int:
    """Return the GEMMs' pool where they have one, else one apart, of which is_in_use() says nothing."""
    return find_thread_pool() if is_in_use() else _start_apart(torch.get_num_threads(), getattr(_own, "number", 0))


def _start_pool(threads: int, number: int) -> int:  # noqa: ARG001 - by which there are several
    return lib.blink_thread_pool_start(threads - 1)


_start, _start_apart = cache(_start_pool), cache(_start_pool)
