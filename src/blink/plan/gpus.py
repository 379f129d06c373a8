# SPDX-License-Identifier: Apache-2.0
"""GPUs that need not be here: what plans and `blink doctor` have to know of them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blink.errors import ConfigError

HOPPER = (9, 0)  # the compute capability


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU that plans can be made for."""

    name: str  # as torch has it
    capability: tuple[int, int]
    processors: int
    shared_bytes: int  # of each processor
    memory: int  # bytes, as CUDA reports them
    bandwidth: float  # bytes per second, by its data sheet
    cuda: tuple[int, int] = (13, 0)  # the CUDA of torch


def _gib(size: float) -> int:
    return int(size * 2**30)


KNOWN_GPUS: Mapping[str, KnownGpu] = {
    "h100": KnownGpu("NVIDIA H100 80GB HBM3", HOPPER, 132, 228 << 10, _gib(79.1), 3.35e12),
    "h200": KnownGpu("NVIDIA H200", HOPPER, 132, 228 << 10, _gib(139.8), 4.8e12),
    "a100": KnownGpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 << 10, _gib(79.1), 2.039e12),
    "l40s": KnownGpu("NVIDIA L40S", (8, 9), 142, 100 << 10, _gib(44.4), 0.864e12),
}


def find_gpu(name: str) -> KnownGpu:
    """Return a known GPU.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in KNOWN_GPUS:
        raise ConfigError(f"--gpu {name} is not known; use {', '.join(KNOWN_GPUS)}.")
    return KNOWN_GPUS[name]
