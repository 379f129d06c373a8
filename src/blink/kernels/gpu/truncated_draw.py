# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
"""The draw of rows with top-k, top-p or min-p on GPUs without clusters: `_select` finds their thresholds, a program a
row, and `_draw` what each part draws above them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blink.kernels.gpu.sampling_rows import (
    MIN_P,
    NUM_ROWS,
    PARAM_STRIDE,
    TOP_K,
    TOP_P,
    Operands,
    can_sample,
    draw_best,
    is_truncated,
)
from blink.kernels.gpu.truncation import MAX_CANDIDATES, find_threshold

_SELECT_WARPS = 8


def draw_truncated(operands: Operands) -> None:
    """Draw from each part of the truncated rows, whose scaled logits the scan has left."""
    logits, batch, slots, parts, block = operands
    num_rows, num_parts = parts.best.shape
    candidates = logits.new_empty(num_rows, MAX_CANDIDATES.value, dtype=torch.float32)
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    _select[(num_rows,)](
        batch.header,
        batch.row_slots,
        slots,
        parts,
        candidates,
        thresholds,
        NUM_PARTS=num_parts,
        PARTS_BLOCK=triton.next_power_of_2(num_parts),
        BLOCK=block,
        num_warps=_SELECT_WARPS,
    )
    _draw[(num_parts, num_rows)](
        batch.header,
        batch.row_slots,
        batch.context_lens,
        slots,
        parts,
        thresholds,
        NUM_PARTS=num_parts,
        BLOCK=block,
        num_warps=operands.num_warps,
    )


@triton.jit
def _select(
    header,
    row_slots,
    slots,
    parts,
    candidates,
    thresholds,
    NUM_PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the threshold of one row, if it is truncated."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(header + NUM_ROWS):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    words, floats = slots.params + slot * PARAM_STRIDE, slots.params_f32 + slot * PARAM_STRIDE
    if is_truncated(words, floats) == 0:
        return
    index = tl.arange(0, PARTS_BLOCK)
    inside = index < NUM_PARTS
    best = tl.load(parts.best + row * NUM_PARTS + index, mask=inside, other=float("-inf"))
    lowest = tl.min(tl.load(parts.lowest + row * NUM_PARTS + index, mask=inside, other=float("inf")), axis=0)
    threshold = find_threshold(
        parts.scaled + row * (NUM_PARTS * BLOCK),
        NUM_PARTS * BLOCK,
        candidates + row * MAX_CANDIDATES,
        lowest,
        tl.max(best, axis=0),
        tl.load(words + TOP_K),
        tl.load(floats + TOP_P),
        tl.load(floats + MIN_P),
    )
    # No logit reaches a threshold that is NaN.
    tl.store(thresholds + row, tl.where(can_sample(best), threshold, float("nan")))


@triton.jit
def _draw(
    header,
    row_slots,
    context_lens,
    slots,
    parts,
    thresholds,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw from one part of a row, if it is truncated."""
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header + NUM_ROWS):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    words, floats = slots.params + slot * PARAM_STRIDE, slots.params_f32 + slot * PARAM_STRIDE
    if is_truncated(words, floats) == 0:
        return
    part = row * NUM_PARTS + tl.program_id(0)
    first = tl.program_id(0) * BLOCK
    values = tl.load(parts.scaled + part * BLOCK + tl.arange(0, BLOCK))
    values = tl.where(values >= tl.load(thresholds + row), values, float("-inf"))
    if tl.max(values, axis=0) > float("-inf"):
        draw_best(parts, part, values, words, tl.load(context_lens + row), first, BLOCK)
    else:
        tl.store(parts.best + part, float("-inf"))
        tl.store(parts.tokens + part, first)
