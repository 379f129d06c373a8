# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""What the sampling kernels do with one row: scan a part of its logits, combine the parts, write the outputs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import PARAM_WORDS, Batch, Header, Param
from blink.kernels.gpu.penalties import adjust_logits
from blink.kernels.gpu.philox import make_gumbel
from blink.kernels.operands import GRAMMAR_DONE, GREEDY_TEMPERATURE, INVALID_LOGITS
from blink.sampling_params import MAX_LOGPROBS

NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
TOP_P = tl.constexpr(int(Param.TOP_P))
MIN_P = tl.constexpr(int(Param.MIN_P))
TOP_K = tl.constexpr(int(Param.TOP_K))
SEED_LOW = tl.constexpr(int(Param.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Param.SEED_HIGH))
NUM_LOGPROBS = tl.constexpr(int(Param.NUM_LOGPROBS))
AUTOMATON = tl.constexpr(int(Param.AUTOMATON))
PARAM_STRIDE = tl.constexpr(PARAM_WORDS)
MAX_TOP = tl.constexpr(MAX_LOGPROBS)
GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)
_INVALID_LOGITS = tl.constexpr(INVALID_LOGITS)
_GRAMMAR_DONE = tl.constexpr(GRAMMAR_DONE)

# Entries that a part keeps for its best logits, MAX_LOGPROBS rounded up to a power of two.
TOP_WIDTH: int = triton.next_power_of_2(MAX_LOGPROBS)
_TOP_WIDTH = tl.constexpr(TOP_WIDTH)

_LOGITS_PER_WARP = 512


class Slots(NamedTuple):
    """Tables of the batch that say how to sample; see Batch."""

    params: Tensor
    params_f32: Tensor
    tokens: Tensor
    stop_tokens: Tensor
    bias_tokens: Tensor
    bias_values: Tensor


class Outputs(NamedTuple):
    """Outputs of the batch; see Batch."""

    sampled_tokens: Tensor
    sampled_logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class Parts(NamedTuple):
    """What the parts of each row leave for the kernels that follow."""

    scaled: Tensor  # float32 [rows, parts * block], logits to draw from; first, memory for the adjustments
    counts: Tensor  # the same memory as int32
    best: Tensor  # float32 [rows, parts]; of a row to be truncated, first its largest logit
    tokens: Tensor  # int32 [rows, parts]; token of `best`
    lowest: Tensor  # float32 [rows, parts]; smallest finite logit to draw from
    raw_largest: Tensor  # float32 [rows, parts]
    raw_mass: Tensor  # float32 [rows, parts]; sum of exp(logit - raw_largest)
    top_values: Tensor  # float32 [rows, parts, TOP_WIDTH]
    top_tokens: Tensor  # int32 [rows, parts, TOP_WIDTH]


class Operands(NamedTuple):
    """What the kernels of one call of sample share."""

    logits: Tensor
    batch: Batch
    slots: Slots
    parts: Parts
    block: int  # logits of a part

    @property
    def num_warps(self) -> int:
        """Warps of a program that treats one part."""
        return self.block // _LOGITS_PER_WARP


@triton.jit
def is_greedy(floats):
    """Say whether a slot takes the largest logit; floats: its row of params."""
    return tl.load(floats + TEMPERATURE) < GREEDY_BELOW


@triton.jit
def is_truncated(words, floats):
    """Say whether a slot draws from a part of the vocabulary only."""
    limited = (tl.load(words + TOP_K) > 0) | (tl.load(floats + TOP_P) < 1.0) | (tl.load(floats + MIN_P) > 0.0)
    return limited & (tl.load(floats + TEMPERATURE) >= GREEDY_BELOW)


@triton.jit
def find_largest(values):
    """Return the largest of one part's values, NaN if one is: the maximum of the hardware passes over these."""
    num_nans = tl.sum((values != values).to(tl.int32), axis=0)
    return tl.where(num_nans > 0, float("nan"), tl.max(values, axis=0))


@triton.jit
def can_sample(best):
    """Say whether the largest of the parts' largest values is finite; best: all of a row, -inf beyond them."""
    largest = tl.max(best, axis=0)
    num_broken = tl.sum(((best != best) | (best == float("inf"))).to(tl.int32), axis=0)
    return (num_broken == 0) & (largest > float("-inf"))


@triton.jit
def store_best(parts, part, values, first):
    """Store the largest of one part's values and its token, the first of equals."""
    _, place = tl.max(values, axis=0, return_indices=True)
    tl.store(parts.best + part, find_largest(values))
    tl.store(parts.tokens + part, first + place)


@triton.jit
def draw_best(parts, part, values, words, context_len, first, BLOCK: tl.constexpr):
    """Store the largest of one part's values plus noise and its token."""
    noise = make_gumbel(first, context_len, tl.load(words + SEED_LOW), tl.load(words + SEED_HIGH), BLOCK)
    store_best(parts, part, values + noise, first)


@triton.jit
def scan_special(
    logits,
    parts,
    slots,
    bits,
    slot,
    part,
    context_len,
    first,
    tokens_stride,
    num_listed,
    FINDS_LOGPROBS: tl.constexpr,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do all that one part of a row asks for whose parameters are not plainly greedy; bits: the tokens allowed.

    Without FINDS_LOGPROBS and DRAWS others find these, and draw what is not greedy.
    """
    words, floats = slots.params + slot * PARAM_STRIDE, slots.params_f32 + slot * PARAM_STRIDE
    scaled = parts.scaled + part * BLOCK
    num_logprobs = tl.load(words + NUM_LOGPROBS)
    if FINDS_LOGPROBS:  # noqa: SIM102  (the compiler makes the outer test)
        if num_logprobs >= 0:
            _scan_logprobs(logits, parts, part, num_logprobs, first, BLOCK)
    if tl.load(words + AUTOMATON) != 0:
        logits = _hide(logits, bits, first, num_listed, BLOCK)
    history = slots.tokens + slot * tokens_stride
    logits = adjust_logits(
        logits, scaled, parts.counts + part * BLOCK, words, floats, history, slots, slot, context_len, first, BLOCK
    )
    if is_greedy(floats):
        store_best(parts, part, logits, first)
    else:
        logits = tl.math.div_rn(logits, tl.load(floats + TEMPERATURE) + tl.zeros_like(logits))
        if not DRAWS:
            tl.store(scaled + tl.arange(0, BLOCK), logits)
        elif is_truncated(words, floats):
            tl.store(scaled + tl.arange(0, BLOCK), logits)
            tl.store(parts.best + part, find_largest(logits))
            tl.store(parts.lowest + part, tl.min(tl.where(logits == float("-inf"), float("inf"), logits), axis=0))
        else:
            draw_best(parts, part, logits, words, context_len, first, BLOCK)


@triton.jit
def _hide(logits, bits, first, num_listed, BLOCK: tl.constexpr):
    """Return one part's logits with what its row may not sample hidden; bits: of the first num_listed tokens."""
    token = first + tl.arange(0, BLOCK)
    words = tl.load(bits + token // 32, mask=token < num_listed, other=0)
    return tl.where((words >> (token % 32)) & 1 != 0, logits, float("-inf"))


@triton.jit
def _scan_logprobs(logits, parts, part, num_top, first, BLOCK: tl.constexpr):
    """Store one part's share of the log-softmax's sum, and its num_top best logits in order."""
    largest = tl.max(logits, axis=0)
    tl.store(parts.raw_largest + part, largest)
    tl.store(parts.raw_mass + part, tl.sum(tl.where(logits > float("-inf"), tl.exp(logits - largest), 0.0), axis=0))
    place = tl.arange(0, BLOCK)
    for rank in range(num_top):
        best, best_place = tl.max(logits, axis=0, return_indices=True)
        tl.store(parts.top_values + part * _TOP_WIDTH + rank, best)
        tl.store(parts.top_tokens + part * _TOP_WIDTH + rank, first + best_place)
        logits = tl.where(place == best_place, float("-inf"), logits)


@triton.jit
def merge_top(parts, outputs, row, num_top, NUM_PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """Write the row's num_top best tokens and their log probabilities."""
    total = _log_mass(parts, row, NUM_PARTS, PARTS_BLOCK)
    entry = tl.arange(0, PARTS_BLOCK * _TOP_WIDTH)
    filled = (entry < NUM_PARTS * _TOP_WIDTH) & (entry % _TOP_WIDTH < num_top)
    place = row * NUM_PARTS * _TOP_WIDTH + entry
    values = tl.load(parts.top_values + place, mask=filled, other=float("-inf"))
    tokens = tl.load(parts.top_tokens + place, mask=filled, other=0)
    for rank in range(num_top):
        best, best_entry = tl.max(values, axis=0, return_indices=True)
        token = tl.sum(tl.where(entry == best_entry, tokens, 0), axis=0)
        tl.store(outputs.top_tokens + row * MAX_TOP + rank, token)
        tl.store(outputs.top_logprobs + row * MAX_TOP + rank, best - total)
        values = tl.where(entry == best_entry, float("-inf"), values)


@triton.jit
def finish_row(
    logits, allowed, parts, outputs, row, num_logprobs, vocab_size, NUM_PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr
):
    """Write the row's token, the best of its parts, and its log probability if asked for; logits: the row."""
    index = tl.arange(0, PARTS_BLOCK)
    inside = index < NUM_PARTS
    # Not from L1: other programs may have just written them.
    values = tl.load(parts.best + row * NUM_PARTS + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
    tokens = tl.load(parts.tokens + row * NUM_PARTS + index, mask=inside, other=vocab_size, cache_modifier=".cg")
    # The lowest of equals, and a place to read at in any case.
    token = tl.min(tl.where(values == tl.max(values, axis=0), tokens, vocab_size - 1), axis=0)
    token = tl.minimum(token, vocab_size - 1)
    is_bare = (tl.max(values, axis=0) == float("-inf")) & (tl.sum((values != values).to(tl.int32), axis=0) == 0)
    nothing = tl.where(is_bare & (tl.load(allowed.may_end + row) != 0), _GRAMMAR_DONE, _INVALID_LOGITS)
    tl.store(outputs.sampled_tokens + row, tl.where(can_sample(values), token, nothing))
    if num_logprobs >= 0:
        total = _log_mass(parts, row, NUM_PARTS, PARTS_BLOCK)
        tl.store(outputs.sampled_logprobs + row, tl.load(logits + token).to(tl.float32) - total)


@triton.jit
def _log_mass(parts, row, NUM_PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """Return the logarithm of the sum of exp(logit) over a row's logits as the model made them."""
    index = tl.arange(0, PARTS_BLOCK)
    inside = index < NUM_PARTS
    peaks = tl.load(parts.raw_largest + row * NUM_PARTS + index, mask=inside, other=float("-inf"))
    masses = tl.load(parts.raw_mass + row * NUM_PARTS + index, mask=inside, other=0.0)
    largest = tl.max(peaks, axis=0)
    return largest + tl.log(tl.sum(masses * tl.exp(peaks - largest), axis=0))
