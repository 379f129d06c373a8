# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false
"""Sampling on the GPU: `_scan` reads the logits once, split over programs: the largest one of greedy rows, and what
penalties, biases and logprobs ask for. From Hopper on clusters draw the rows that are not greedy, which `_scan` then
only changes, if at all, and `_finish` writes the outputs. On other GPUs `_scan` draws what is not truncated, `_select`
finds the thresholds of the rest, and `_draw` samples these and ends the others.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.constraint import Allowed, find_allowed
from blink.kernels.gpu.penalties import has_adjustments
from blink.kernels.gpu.sampling_rows import (
    AUTOMATON,
    MIN_P,
    NUM_LOGPROBS,
    NUM_ROWS,
    PARAM_STRIDE,
    TOP_K,
    TOP_P,
    TOP_WIDTH,
    Outputs,
    Parts,
    Slots,
    can_sample,
    draw_best,
    finish_row,
    is_greedy,
    is_truncated,
    merge_top,
    scan_special,
    store_best,
)
from blink.kernels.gpu.truncation import MAX_CANDIDATES, find_threshold

# Few rows are split finely, so that they use many SMs, and scanned by one kernel whatever their parameters are. Of
# many rows, plainly greedy ones are scanned by a kernel of their own, which needs few registers and so reads faster.
_FEW_ROWS = 8
_FINE_BLOCK, _BLOCK = 2048, 4096
_LOGITS_PER_WARP = 512
_SPECIAL_LOGITS_PER_WARP = 256  # of many rows for clusters: two programs on an SM
_SELECT_WARPS = 8
_FINISHERS = 2  # programs of a row: of its token, of its best logprobs
# Of many rows a program scans several parts: most programs have nothing to do, and each takes its time.
_MANY_ROWS, _PARTS_OF_PROGRAM = 32, 4


class _Call(NamedTuple):
    """Operands of one call, as the kernels share them."""

    logits: Tensor
    batch: Batch
    num_rows: int
    block: int
    rows: tuple[Tensor, ...]
    slots: Slots
    allowed: Allowed
    parts: Parts
    outputs: Outputs

    @property
    def num_parts(self) -> int:
        return self.parts.best.shape[1]

    @property
    def num_warps(self) -> int:
        return self.block // _LOGITS_PER_WARP


def sample(logits: Tensor, batch: Batch, num_rows: int) -> None:
    """Compute sample; logits: [num_rows, vocab], rows contiguous."""
    assert logits.stride(1) == 1 and batch.tokens.stride(1) == 1
    vocab_size = logits.shape[1]
    block = _FINE_BLOCK if num_rows <= _FEW_ROWS else _BLOCK
    call = _Call(
        logits,
        batch,
        num_rows,
        block,
        (batch.header, batch.row_slots, batch.context_lens),
        Slots(batch.params, batch.params_f32, batch.tokens, batch.stop_tokens, batch.bias_tokens, batch.bias_values),
        find_allowed(batch, num_rows, vocab_size),
        _allocate_parts(logits.device, num_rows, triton.cdiv(vocab_size, block), block),
        Outputs(batch.sampled_tokens, batch.sampled_logprobs, batch.top_tokens, batch.top_logprobs),
    )
    if logits.is_cuda and _has_clusters():
        _sample_by_clusters(call)
    else:
        _sample_by_programs(call)


def _sample_by_clusters(call: _Call) -> None:
    from blink.kernels.gpu.decode.cluster_sampling import can_read, sample_rows

    changed = call.logits.new_empty(call.num_rows, dtype=torch.int32)
    scans_all = not can_read(call.logits)
    _scan_rows(call, changed, scans_all=scans_all, draws=False)
    sample_rows(call.logits, call.parts, changed, call.batch, call.num_parts * call.block)
    _finish[(_FINISHERS if scans_all else 1, call.num_rows)](
        *_heads(call),
        *call.rows[:2],
        *_tails(call),
        NUM_PARTS=call.num_parts,
        PARTS_BLOCK=triton.next_power_of_2(call.num_parts),
        num_warps=call.num_warps,
    )


def _sample_by_programs(call: _Call) -> None:
    arrivals = call.logits.new_empty(call.num_rows, dtype=torch.int32)
    candidates = call.logits.new_empty(call.num_rows, MAX_CANDIDATES.value, dtype=torch.float32)
    thresholds = call.logits.new_empty(call.num_rows, dtype=torch.float32)
    _scan_rows(call, arrivals, scans_all=True, draws=True)
    sizes = {
        "NUM_PARTS": call.num_parts,
        "PARTS_BLOCK": triton.next_power_of_2(call.num_parts),
        "BLOCK": call.block,
    }
    results = (candidates, thresholds, arrivals)
    _select[(call.num_rows,)](*call.rows[:2], call.slots, call.parts, *results, **sizes, num_warps=_SELECT_WARPS)
    _draw[(call.num_parts, call.num_rows)](
        *_heads(call), *call.rows, *_tails(call), thresholds, arrivals, **sizes, num_warps=call.num_warps
    )


def _heads(call: _Call) -> tuple[Any, ...]:
    return call.logits, call.logits.stride(0), call.logits.shape[1]


def _tails(call: _Call) -> tuple[Any, ...]:
    return call.slots, call.allowed, call.parts, call.outputs


def _scan_rows(call: _Call, changed: Tensor, *, scans_all: bool, draws: bool) -> None:
    few = call.num_rows <= _FEW_ROWS
    parts_of_program = _PARTS_OF_PROGRAM if call.num_rows > _MANY_ROWS and not draws else 1
    for scans_plain, scans_special in ((True, True),) if few else ((True, False), (False, True)):
        _scan[(triton.cdiv(call.num_parts, parts_of_program), call.num_rows)](
            call.logits,
            call.logits.stride(0),
            call.batch.tokens.stride(0),
            call.logits.shape[1],
            *call.rows,
            call.slots,
            call.allowed,
            call.parts,
            changed,
            SCANS_PLAIN=scans_plain,
            SCANS_SPECIAL=scans_special,
            SCANS_ALL=scans_all,
            DRAWS=draws,
            PARTS_OF_PROGRAM=parts_of_program,
            NUM_PARTS=call.num_parts,
            BLOCK=call.block,
            num_warps=call.num_warps if scans_plain or draws else call.block // _SPECIAL_LOGITS_PER_WARP,
        )


@functools.cache
def _has_clusters() -> bool:
    from blink.kernels.gpu.decode.launch import can_launch

    return can_launch()


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
def _scan(
    logits,
    logits_stride,
    tokens_stride,
    vocab_size,
    header,
    row_slots,
    context_lens,
    slots,
    allowed,
    parts,
    changed,
    SCANS_PLAIN: tl.constexpr,
    SCANS_SPECIAL: tl.constexpr,
    SCANS_ALL: tl.constexpr,
    DRAWS: tl.constexpr,
    PARTS_OF_PROGRAM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    is_bare = (has_adjustments(words, floats, context_len) == 0) & (tl.load(words + AUTOMATON) == 0)
    if SCANS_ALL:
        is_bare = is_bare & (tl.load(words + NUM_LOGPROBS) < 0)
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
                    values,
                    parts,
                    slots,
                    bits,
                    slot,
                    part,
                    context_len,
                    first,
                    tokens_stride,
                    num_listed,
                    SCANS_ALL,
                    DRAWS,
                    BLOCK,
                )


@triton.jit
def _select(
    header,
    row_slots,
    slots,
    parts,
    candidates,
    thresholds,
    arrivals,
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
    tl.store(arrivals + row, 0)


@triton.jit
def _draw(
    logits,
    logits_stride,
    vocab_size,
    header,
    row_slots,
    context_lens,
    slots,
    allowed,
    parts,
    outputs,
    thresholds,
    arrivals,
    NUM_PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sample one part of a truncated row; the part that ends last ends the row. Others are ended by the first."""
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header + NUM_ROWS):
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    words, floats = slots.params + slot * PARAM_STRIDE, slots.params_f32 + slot * PARAM_STRIDE
    num_logprobs = tl.load(words + NUM_LOGPROBS)
    if num_logprobs > 0:  # noqa: SIM102  (the compiler would make both tests)
        if tl.program_id(0) == NUM_PARTS - 1:
            merge_top(parts, outputs, row, num_logprobs, NUM_PARTS, PARTS_BLOCK)
    row_logits = logits + row * logits_stride
    if is_truncated(words, floats) == 0:
        if tl.program_id(0) == 0:
            finish_row(row_logits, allowed, parts, outputs, row, num_logprobs, vocab_size, NUM_PARTS, PARTS_BLOCK)
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
    tl.debug_barrier()
    if tl.atomic_add(arrivals + row, 1) == NUM_PARTS - 1:
        finish_row(row_logits, allowed, parts, outputs, row, num_logprobs, vocab_size, NUM_PARTS, PARTS_BLOCK)


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
