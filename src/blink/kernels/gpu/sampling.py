# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false
"""Sampling on the GPU: `_scan` reads the logits once, split over programs: the largest one of greedy rows, and what
penalties, biases and logprobs ask for. From Hopper on clusters draw the rows that are not greedy, which `_scan` then
only changes, if at all, and find the logprobs. On other GPUs `_scan` draws what is not truncated, and truncated_draw.py
the rest. `_finish` writes the outputs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.constraint import Allowed, find_allowed
from blink.kernels.gpu.decode.cluster_sampling import can_read, sample_rows
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.penalties import has_adjustments
from blink.kernels.gpu.sampling_rows import (
    AUTOMATON,
    NUM_LOGPROBS,
    NUM_ROWS,
    PARAM_STRIDE,
    TOP_WIDTH,
    Operands,
    Outputs,
    Parts,
    Slots,
    finish_row,
    is_greedy,
    merge_top,
    scan_special,
    store_best,
)
from blink.kernels.gpu.truncated_draw import draw_truncated

# Few rows are split finely, so that they use many SMs, and scanned by one kernel whatever their parameters are. Of
# many rows, plainly greedy ones are scanned by a kernel of their own, which needs few registers and so reads faster.
_FEW_ROWS = 8
_FINE_BLOCK, _BLOCK = 2048, 4096
_SPECIAL_LOGITS_PER_WARP = 256  # of many rows for clusters: two programs on an SM
_FINISHERS = 2  # programs of a row: of its token, of its best logprobs
# Of many rows a program scans several parts: most programs have nothing to do, and each takes its time.
_MANY_ROWS, _PARTS_OF_PROGRAM = 32, 4


def sample(logits: Tensor, batch: Batch, num_rows: int) -> None:
    """Compute sample; logits: [num_rows, vocab], rows contiguous."""
    assert logits.stride(1) == 1 and batch.tokens.stride(1) == 1
    vocab_size = logits.shape[1]
    block = _FINE_BLOCK if num_rows <= _FEW_ROWS else _BLOCK
    num_parts = triton.cdiv(vocab_size, block)
    allowed = find_allowed(batch, num_rows, vocab_size)
    parts = _allocate_parts(logits.device, num_rows, num_parts, block)
    slots = Slots(batch.params, batch.params_f32, batch.tokens, batch.stop_tokens, batch.bias_tokens, batch.bias_values)
    outputs = Outputs(batch.sampled_tokens, batch.sampled_logprobs, batch.top_tokens, batch.top_logprobs)
    operands = Operands(logits, batch, slots, parts, block)
    by_clusters = logits.is_cuda and _has_clusters()
    scans_all = not (by_clusters and can_read(logits))
    changed = logits.new_empty(num_rows, dtype=torch.int32)
    _scan_rows(operands, allowed, changed, scans_all=scans_all, draws=not by_clusters)
    if by_clusters:
        sample_rows(logits, parts, changed, batch, num_parts * block, finds_logprobs=not scans_all)
    else:
        draw_truncated(operands)
    _finish[(_FINISHERS if scans_all else 1, num_rows)](
        logits,
        logits.stride(0),
        vocab_size,
        batch.header,
        batch.row_slots,
        slots,
        allowed,
        parts,
        outputs,
        NUM_PARTS=num_parts,
        PARTS_BLOCK=triton.next_power_of_2(num_parts),
        num_warps=operands.num_warps,
    )


def _scan_rows(operands: Operands, allowed: Allowed, changed: Tensor, *, scans_all: bool, draws: bool) -> None:
    logits, batch, slots, parts, block = operands
    num_rows, num_parts = parts.best.shape
    parts_of_program = _PARTS_OF_PROGRAM if num_rows > _MANY_ROWS and not draws else 1
    kinds = ((True, True),) if num_rows <= _FEW_ROWS else ((True, False), (False, True))
    for scans_plain, scans_special in kinds:
        _scan[(triton.cdiv(num_parts, parts_of_program), num_rows)](
            logits,
            logits.stride(0),
            batch.tokens.stride(0),
            logits.shape[1],
            batch.header,
            batch.row_slots,
            batch.context_lens,
            slots,
            allowed,
            parts,
            changed,
            SCANS_PLAIN=scans_plain,
            SCANS_SPECIAL=scans_special,
            SCANS_ALL=scans_all,
            DRAWS=draws,
            PARTS_OF_PROGRAM=parts_of_program,
            NUM_PARTS=num_parts,
            BLOCK=block,
            num_warps=operands.num_warps if scans_plain or draws else block // _SPECIAL_LOGITS_PER_WARP,
        )


@functools.cache
def _has_clusters() -> bool:
    return has_clusters()


def _allocate_parts(device: torch.device, num_rows: int, num_parts: int, block: int) -> Parts:
    def floats(*shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=torch.float32, device=device)

    scaled = floats(num_parts * block)
    return Parts(
        scaled=scaled,
        counts=scaled.view(torch.int32),
        best=floats(num_parts),
        tokens=floats(num_parts).view(torch.int32),
        lowest=floats(num_parts),
        raw_largest=floats(num_parts),
        raw_mass=floats(num_parts),
        top_values=floats(num_parts, TOP_WIDTH),
        top_tokens=floats(num_parts, TOP_WIDTH).view(torch.int32),
    )


@triton.jit
def _is_bare(words, floats, context_len, FINDS_LOGPROBS: tl.constexpr):
    """Say whether a slot takes its token from the logits as they are, and the scan has nothing more to do for it."""
    is_bare = (has_adjustments(words, floats, context_len) == 0) & (tl.load(words + AUTOMATON) == 0)
    if FINDS_LOGPROBS:
        is_bare = is_bare & (tl.load(words + NUM_LOGPROBS) < 0)
    return is_bare


@triton.jit
def _scan(
    logits, logits_stride, tokens_stride, vocab_size, header, row_slots, context_lens, slots, allowed, parts, changed,
    SCANS_PLAIN: tl.constexpr, SCANS_SPECIAL: tl.constexpr, SCANS_ALL: tl.constexpr, DRAWS: tl.constexpr,
    PARTS_OF_PROGRAM: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scan some parts of one row, if its parameters are of a kind that this kernel treats.

    SCANS_ALL: also find logprobs, and scan rows of which nothing is asked but to draw from the logits as they are.
    DRAWS: draw what is not truncated. changed: int32 [rows]; written for each special row, 1 if it was scanned.
    """
    row = tl.program_id(1)
    if row >= tl.load(header + NUM_ROWS):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    context_len = tl.load(context_lens + row)
    words, floats = slots.params + slot * PARAM_STRIDE, slots.params_f32 + slot * PARAM_STRIDE
    is_bare = _is_bare(words, floats, context_len, SCANS_ALL)
    is_plain = is_bare & is_greedy(floats)
    # Nested, so that the compiler makes the outer tests.
    if not SCANS_PLAIN:  # noqa: SIM102
        if is_plain:
            return
    if not SCANS_SPECIAL:  # noqa: SIM102
        if is_plain == 0:
            return
    if SCANS_SPECIAL and not DRAWS:
        is_left = is_bare & (is_plain == 0) & (not SCANS_ALL)
        if tl.program_id(0) == 0:
            tl.store(changed + row, tl.where(is_left, 0, 1))
        if is_left:
            return
    # What a part needs is loaded for each: across parts it would take the registers of a program more on the SM.
    for index in tl.range(PARTS_OF_PROGRAM, disable_licm=True):
        first = (tl.program_id(0) * PARTS_OF_PROGRAM + index) * BLOCK
        token = first + tl.arange(0, BLOCK)
        part = row.to(tl.int64) * NUM_PARTS + first // BLOCK
        if first < vocab_size:
            place = row.to(tl.int64) * logits_stride + token
            values = tl.load(logits + place, mask=(token < vocab_size), other=float("-inf")).to(tl.float32)
            if is_plain:
                if SCANS_PLAIN:
                    store_best(parts, part, values, first)
            elif SCANS_SPECIAL:
                allowed_list = tl.load(allowed.lists + row).to(tl.int64)
                bits = allowed.bits + allowed_list * tl.cdiv(vocab_size, 32)
                num_listed = tl.where(allowed_list >= 0, vocab_size, 0)
                scan_special(
                    values, parts, slots, bits, slot, part, context_len, first, tokens_stride, num_listed,
                    SCANS_ALL, DRAWS, BLOCK,
                )  # fmt: skip


@triton.jit
def _finish(
    logits,
    logits_stride,
    vocab_size,
    header,
    row_slots,
    slots,
    allowed,
    parts,
    outputs,
    NUM_PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """Write a row's token, and beside that its best logprobs."""
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header + NUM_ROWS):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    num_logprobs = tl.load(slots.params + slot * PARAM_STRIDE + NUM_LOGPROBS)
    if tl.program_id(0) == 0:
        row_logits = logits + row * logits_stride
        finish_row(row_logits, allowed, parts, outputs, row, num_logprobs, vocab_size, NUM_PARTS, PARTS_BLOCK)
    elif num_logprobs > 0:
        merge_top(parts, outputs, row, num_logprobs, NUM_PARTS, PARTS_BLOCK)
