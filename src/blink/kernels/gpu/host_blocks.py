# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""Copies blocks of the KV cache to the host's memory and back, as the scheduler lists them (csrc's HostCopy).

A program owns the same words of all blocks, and makes the copies in their order. So a block that is kept, restored and
kept again within one launch needs no word between programs. No copy engine takes part: a graph's copies have fixed
addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 24  # which keep enough words in flight for the bus, on as few SMs of those that the step then runs on
_FIELDS: tl.constexpr = tl.constexpr(3)  # of a HostCopy
_BLOCK = 4096  # words that a program copies at once


def copy_listed(blocks: Tensor, host: Tensor, copies: Tensor, bounds: Tensor) -> None:
    """Make the copies from number bounds[0] up to bounds[1] in a circular list.

    copies: int32 [entries, 3], csrc's HostCopy: a block, a host block, and whether to the host.
    blocks: [pieces, blocks, words]; host: [pieces, host blocks, words], in locked memory of the host; both int32, and
    contiguous. bounds: int32 [2]; entries: a power of two.
    """
    pieces, num_blocks, words = blocks.shape
    assert host.shape[0] == pieces and host.shape[2] == words and words % 4 == 0
    assert blocks.is_contiguous() and host.is_contiguous() and blocks.dtype == host.dtype == torch.int32
    entries = copies.shape[0]
    assert entries & (entries - 1) == 0
    # fmt: off
    _copy[(_PROGRAMS,)](
        blocks, host, copies, bounds, num_blocks, host.shape[1], pieces,
        ENTRIES=entries, WORDS=words, PROGRAMS=_PROGRAMS, BLOCK=min(_BLOCK, triton.next_power_of_2(words)), num_warps=8,
    )
    # fmt: on


@triton.jit
def _copy(
    blocks, host, copies, bounds, num_blocks, num_host, pieces,
    ENTRIES: tl.constexpr, WORDS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, end = tl.load(bounds), tl.load(bounds + 1)
    units_of_piece: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for number in range(0, end - first):  # numbers may wrap: their difference does not
        entry = copies + ((first + number) & (ENTRIES - 1)) * _FIELDS
        block, host_block = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
        # One of the two directions has no words.
        going = tl.where(tl.load(entry + 2) != 0, WORDS, 0)
        for unit in range(tl.program_id(0), pieces * units_of_piece, PROGRAMS):
            piece = tl.cast(unit // units_of_piece, tl.int64)
            at = (unit % units_of_piece) * BLOCK + tl.arange(0, BLOCK)
            inside = blocks + (piece * num_blocks + block) * WORDS + at
            outside = host + (piece * num_host + host_block) * WORDS + at
            comes, goes = at < WORDS - going, at < going
            words = tl.load(outside, mask=comes, other=0)
            kept = tl.load(inside, mask=goes, other=0)
            tl.store(inside, words, mask=comes)
            tl.store(outside, kept, mask=goes)
        tl.debug_barrier()  # what the next copy reads may be what another thread of the program has written
