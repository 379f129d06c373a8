# SPDX-License-Identifier: Apache-2.0
"""What kernels and their tiles depend on of a GPU: the current one's, or a named one's that need not be there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from blink.plan.gpus import HOPPER, KnownGpu, find_gpu

P = ParamSpec("P")
R = TypeVar("R")


_supposed: KnownGpu | None = None


@contextmanager
def supposing(name: str) -> Iterator[KnownGpu]:
    """Within it, a known GPU takes the place of the current one in all questions, but computes nothing.

    Raises:
        ConfigError: there is none of that name.
    """
    global _supposed
    before, _supposed = _supposed, find_gpu(name)
    try:
        yield _supposed
    finally:
        _supposed = before


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """Remember what a function of hashable arguments returns, for each GPU by itself."""

    @functools.cache
    def find(gpu: tuple[str, int], *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: ARG001 - a part of the key
        return function(*args, **kwargs)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return find((gpu_name(), count_processors()), *args, **kwargs)

    return wrapper


def gpu_name() -> str:
    """Return the GPU's name."""
    return _supposed.name if _supposed else torch.cuda.get_device_name()


def capability() -> tuple[int, int]:
    """Return the GPU's compute capability."""
    return _supposed.capability if _supposed else torch.cuda.get_device_capability()


def count_processors() -> int:
    """Return how many SMs there are."""
    return _supposed.processors if _supposed else torch.cuda.get_device_properties().multi_processor_count


def count_free_processors() -> int:
    """Return how many SMs kernels have: one belongs to the resident scheduler."""
    return count_processors() - 1


def shared_bytes() -> int:
    """Return the shared memory of an SM."""
    return _supposed.shared_bytes if _supposed else torch.cuda.get_device_properties().shared_memory_per_multiprocessor


def cuda_version() -> tuple[int, ...]:
    """Return the version of torch's CUDA."""
    return _supposed.cuda if _supposed else tuple(map(int, (torch.version.cuda or "0").split(".")))


def has_clusters() -> bool:
    """Tell whether the GPU has clusters, bulk copies and PDL launches: from Hopper on."""
    return capability() >= HOPPER


def has_warpgroups() -> bool:
    """Tell whether the GPU has the GEMMs of warpgroups that csrc/kernels/gemm/gemm.cuh uses: Hopper alone."""
    return capability() == HOPPER
