# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingParameterType=false
"""What changes logits before sampling, inside GPU kernels: each program treats its own part of one row's vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from blink.kernels.batch import Param
from blink.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKENS

REPETITION = tl.constexpr(int(Param.REPETITION_PENALTY))
PRESENCE = tl.constexpr(int(Param.PRESENCE_PENALTY))
FREQUENCY = tl.constexpr(int(Param.FREQUENCY_PENALTY))
NUM_PROMPT = tl.constexpr(int(Param.NUM_PROMPT_TOKENS))
MIN_TOKENS = tl.constexpr(int(Param.MIN_TOKENS))
NUM_STOPS = tl.constexpr(int(Param.NUM_STOP_TOKENS))
NUM_BIASES = tl.constexpr(int(Param.NUM_BIASES))
MAX_STOPS = tl.constexpr(MAX_STOP_TOKENS)
MAX_BIASES = tl.constexpr(MAX_LOGIT_BIASES)

_HISTORY_BLOCK = tl.constexpr(1024)
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def has_adjustments(words, floats, context_len):
    """Say whether a slot's parameters change its logits; words, floats: the slot's row of params in both views."""
    penalized = has_penalties(floats)
    return penalized | (tl.load(words + NUM_BIASES) > 0) | _is_too_short(words, context_len)


@triton.jit
def has_penalties(floats):
    """Say whether a slot has any of the three penalties."""
    repetition = tl.load(floats + REPETITION) != 1.0
    return repetition | (tl.load(floats + PRESENCE) != 0.0) | (tl.load(floats + FREQUENCY) != 0.0)


@triton.jit
def _is_too_short(words, context_len):
    return context_len - tl.load(words + NUM_PROMPT) < tl.load(words + MIN_TOKENS)


@triton.jit
def adjust_logits(
    logits, scratch, counts, words, floats, history, slots, slot, context_len, first, BLOCK: tl.constexpr
):
    """Return the float32 logits of indices first .. first + BLOCK changed as the slot asks for.

    scratch: this program's BLOCK float32 of memory, where stop tokens and biases are applied; counts: the same as
    int32; words, floats: the slot's params; history: its tokens; slots: the tables of all slots.
    """
    seen = tl.zeros((BLOCK,), tl.int32)
    penalized = has_penalties(floats)
    if penalized:
        seen = _count_tokens(counts, history, context_len, tl.load(words + NUM_PROMPT), first, BLOCK)
    logits = _apply_entries(logits, scratch, words, slots, slot, context_len, first, BLOCK)
    if penalized:
        repetition = tl.load(floats + REPETITION)
        scaled = tl.where(logits > 0, tl.math.div_rn(logits, repetition + tl.zeros_like(logits)), logits * repetition)
        logits = tl.where(seen != 0, scaled, logits)
        generated = seen & (_IN_PROMPT - 1)
        penalty = tl.load(floats + FREQUENCY) * generated.to(tl.float32) + tl.load(floats + PRESENCE)
        logits = tl.where(generated > 0, logits - penalty, logits)
    return logits


@triton.jit
def _count_tokens(counts, history, context_len, num_prompt, first, BLOCK: tl.constexpr):
    """Return how often each index was generated, plus _IN_PROMPT if the prompt holds it."""
    place = tl.arange(0, BLOCK)
    tl.store(counts + place, tl.zeros((BLOCK,), tl.int32))
    tl.debug_barrier()
    for start in range(0, context_len, _HISTORY_BLOCK):
        position = start + tl.arange(0, _HISTORY_BLOCK)
        token = tl.load(history + position, mask=position < context_len, other=-1) - first
        mine = (token >= 0) & (token < BLOCK)
        in_prompt = position < num_prompt
        tl.atomic_or(
            counts + token, tl.full((_HISTORY_BLOCK,), _IN_PROMPT, tl.int32), mask=mine & in_prompt, sem="relaxed"
        )
        tl.atomic_add(
            counts + token, tl.full((_HISTORY_BLOCK,), 1, tl.int32), mask=mine & (position >= num_prompt), sem="relaxed"
        )
    tl.debug_barrier()
    # Not from L1: the atomics were done in L2.
    found = tl.load(counts + place, cache_modifier=".cg")
    tl.debug_barrier()
    return found


@triton.jit
def _apply_entries(logits, scratch, words, slots, slot, context_len, first, BLOCK: tl.constexpr):
    """Return the logits with the stop tokens of a text that is still too short hidden and biases added."""
    num_stops = tl.where(_is_too_short(words, context_len), tl.load(words + NUM_STOPS), 0)
    num_biases = tl.load(words + NUM_BIASES)
    if num_stops + num_biases > 0:
        place = tl.arange(0, BLOCK)
        tl.store(scratch + place, logits)
        tl.debug_barrier()
        entry = tl.arange(0, MAX_STOPS)
        token = tl.load(slots.stop_tokens + slot * MAX_STOPS + entry, mask=entry < num_stops, other=-1) - first
        tl.store(scratch + token, tl.full((MAX_STOPS,), float("-inf"), tl.float32), mask=(token >= 0) & (token < BLOCK))
        tl.debug_barrier()
        entry = tl.arange(0, MAX_BIASES)
        token = tl.load(slots.bias_tokens + slot * MAX_BIASES + entry, mask=entry < num_biases, other=-1) - first
        bias = tl.load(slots.bias_values + slot * MAX_BIASES + entry, mask=entry < num_biases, other=0.0)
        tl.atomic_add(scratch + token, bias, mask=(token >= 0) & (token < BLOCK), sem="relaxed")
        tl.debug_barrier()
        logits = tl.load(scratch + place, cache_modifier=".cg")
        tl.debug_barrier()
    return logits
