# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
"""Copies of recurrent states on the GPU: one kernel for all layers, which itself reads what is to be copied.

So a captured step holds it whether anything is copied or not. Programs find nothing with one load, and end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blink.kernels.layer_cache import StateCache
from blink.kernels.snapshots import SnapshotRows

_PROGRAMS = 264  # two for each SM of an H100
_WORDS = 4096  # that a program copies at once


def copy_states(group: StateCache, rows: SnapshotRows, *, saves: bool) -> None:
    """Compute CopyStates of kernels/snapshots.py, by a launch that is no PDL launch."""
    states, inputs = (kept.flatten(2).view(torch.int32) for kept in (group.states, group.inputs))
    layers, num_rows = states.shape[0], rows.marks.shape[0]
    sizes = {"LAYERS": layers, "STATE_WORDS": states.shape[2], "INPUT_WORDS": inputs.shape[2]}
    most = layers * (triton.cdiv(sizes["STATE_WORDS"], _WORDS) + triton.cdiv(sizes["INPUT_WORDS"], _WORDS))
    _copy[(min(most, _PROGRAMS),)](
        *(states, inputs, rows.marks, rows.slots, rows.first, num_rows, states.stride(0), inputs.stride(0)),
        **sizes,
        SAVES=saves,
        ROWS=triton.next_power_of_2(num_rows),
        WORDS=_WORDS,
        num_warps=4,
    )


@triton.jit
def _copy(
    states,
    inputs,
    marks,
    slots,
    first_snapshot,
    num_rows,
    state_stride,
    input_stride,
    LAYERS: tl.constexpr,
    STATE_WORDS: tl.constexpr,
    INPUT_WORDS: tl.constexpr,
    SAVES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy some tiles of each layer, of one marked row after the other."""
    STATE_TILES: tl.constexpr = (STATE_WORDS + WORDS - 1) // WORDS
    TILES: tl.constexpr = STATE_TILES + (INPUT_WORDS + WORDS - 1) // WORDS
    row = tl.arange(0, ROWS)
    mark = tl.load(marks + row, row < num_rows, other=0)
    place = -1
    for _ in range(tl.sum((mark > 0).to(tl.int32))):
        place = tl.min(tl.where((mark > 0) & (row > place), row, ROWS))
        slot = tl.load(slots + place).to(tl.int64)
        snapshot = tl.load(marks + place).to(tl.int64) + (first_snapshot - 1)
        source = slot if SAVES else snapshot
        target = snapshot if SAVES else slot
        for unit in range(tl.program_id(0), LAYERS * TILES, tl.num_programs(0)):
            layer, tile = unit // TILES, unit % TILES
            if tile < STATE_TILES:
                _move(states + layer * state_stride.to(tl.int64), source, target, tile, STATE_WORDS, WORDS)
            else:
                at = inputs + layer * input_stride.to(tl.int64)
                _move(at, source, target, tile - STATE_TILES, INPUT_WORDS, WORDS)


@triton.jit
def _move(slots, source, target, tile, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """Copy a tile of a layer's slot to another."""
    word = tile * WORDS + tl.arange(0, WORDS)
    values = tl.load(slots + source * SIZE + word, word < SIZE)
    tl.store(slots + target * SIZE + word, values, word < SIZE)
