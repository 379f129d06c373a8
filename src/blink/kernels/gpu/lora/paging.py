# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""Copies an adapter from the host's memory to a slot of the GPU's, by an order of the scheduler.

Programs read the host's memory through the GPU's own addresses: no copy engine, and no host, takes part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 24  # which keep enough reads in flight for the bus, on as few SMs of those that steps run on
_BLOCK = 4096  # words that a program reads at once


def copy_ordered(places: Sequence[tuple[Tensor, Tensor]], order: Tensor) -> None:
    """Copy row order[0] of sources to row order[1] of targets, then write the order's number order[2] to order[3].

    Nothing is copied where that number is there already. places: of each rank a source [adapters, elements], in locked
    memory of the host, and a target [slots, elements], as wide, in memory that this GPU reaches. order: int32 [4],
    csrc's CopyOrder.
    """
    for source, target in places:
        words, kept = source.view(torch.int32), target.view(torch.int32)
        assert words.shape[1] == kept.shape[1] and words.shape[1] % 4 == 0
        _copy[(_PROGRAMS,)](words, kept, order, words.shape[1], PROGRAMS=_PROGRAMS, BLOCK=_BLOCK, num_warps=8)
    _mark_done[(1,)](order, num_warps=1)


@triton.jit
def _copy(source, target, order, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    adapter, slot = tl.load(order).to(tl.int64), tl.load(order + 1).to(tl.int64)
    end = tl.where(tl.load(order + 2) != tl.load(order + 3), size, 0)
    for start in range(tl.program_id(0) * BLOCK, end, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        # The host may have written other words there since the last copy: what caches hold of them is not read.
        words = tl.load(source + adapter * size + at, mask=at < size, volatile=True)
        tl.store(target + slot * size + at, words, mask=at < size)


@triton.jit
def _mark_done(order):
    tl.atomic_xchg(order + 3, tl.load(order + 2), sem="release", scope="gpu")
