# SPDX-License-Identifier: Apache-2.0
"""The time of one kernel or of a few, replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import triton


def median_us(call: Callable[[], object], rep: int = 10) -> float:
    """Return the median microseconds of what `call` launches; rep: milliseconds of replays."""
    median = triton.testing.do_bench_cudagraph(call, rep=rep, return_mode="median")
    return 1000 * float(median)  # pyright: ignore[reportArgumentType]
