# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportMissingParameterType=false
# pyright: reportOperatorIssue=false
"""The threshold of min-p, top-k and top-p inside GPU kernels: one program searches one row, without sorting it.

Both limits ask for the largest t such that the tokens with logit >= t reach a target: k tokens, or a mass of p. Passes
over the row narrow the interval around t until its logits fit one block; bisecting their bit patterns ends exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_CANDIDATES = tl.constexpr(4096)

# Logits that one program loads at once: sums are kept per lane while measuring, so fewer of them there.
_MEASURE_BLOCK = tl.constexpr(2048)
_COLLECT_BLOCK = tl.constexpr(8192)
_CUTS = tl.constexpr(8)
# Each pass narrows the interval eightfold; logits that so many passes cannot tell apart count as equal.
_MAX_PASSES = tl.constexpr(12)


@triton.jit
def find_threshold(logits, width, candidates, lowest, largest, top_k, top_p, min_p):
    """Return the smallest logit that may be sampled.

    logits: the row, float32 [width], -inf where nothing is; lowest, largest: its finite extremes;
    candidates: float32 [MAX_CANDIDATES] of scratch.
    """
    threshold = lowest
    if min_p > 0:
        threshold = tl.maximum(threshold, largest + tl.log(min_p))
    if top_k > 0:
        threshold = _search(logits, width, candidates, threshold, largest, top_k.to(tl.float32), False)
    if top_p < 1.0:
        threshold = _search(logits, width, candidates, threshold, largest, top_p, True)
    return threshold


@triton.jit
def _search(logits, width, candidates, low, largest, target, IS_MASS: tl.constexpr):
    """Return the largest t >= low whose tokens reach target: a count, or a share of the mass of the logits >= low."""
    high = _from_key(_to_key(largest) + 1)
    # Tokens and what they weigh at or above low and high.
    num_low, num_high, above = width * 1.0, 0.0, 0.0
    step = 0
    while (step < _MAX_PASSES) & ((step == 0) | (num_low - num_high > MAX_CANDIDATES)):
        cuts = low + (high - low) * (tl.arange(0, _CUTS).to(tl.float32) / _CUTS)
        counts, weights = _measure(logits, width, cuts, largest, IS_MASS)
        if IS_MASS and step == 0:
            target = target * tl.max(weights, axis=0)
        reached = (weights >= target) | (tl.arange(0, _CUTS) == 0)
        low = tl.max(tl.where(reached, cuts, float("-inf")), axis=0)
        num_low = tl.min(tl.where(reached, counts, float("inf")), axis=0)
        high = tl.min(tl.where(reached, high, cuts), axis=0)
        num_high = tl.max(tl.where(reached, num_high, counts), axis=0)
        above = tl.max(tl.where(reached, above, weights), axis=0)
        step += 1
    if num_low - num_high <= MAX_CANDIDATES:
        count = _collect(logits, width, candidates, low, high)
        low = _bisect(candidates, count, low, high, largest, target - above, IS_MASS)
    return low


@triton.jit
def _measure(logits, width, cuts, largest, IS_MASS: tl.constexpr):
    """Return how many logits are >= each cut and what they weigh, both float32 [_CUTS]."""
    counts = tl.zeros((_CUTS, _MEASURE_BLOCK), tl.float32)
    weights = tl.zeros((_CUTS, _MEASURE_BLOCK), tl.float32)
    for start in tl.range(0, width, _MEASURE_BLOCK, num_stages=4):
        place = start + tl.arange(0, _MEASURE_BLOCK)
        values = tl.load(logits + place, mask=place < width, other=float("-inf"))[None, :]
        reached = values >= cuts[:, None]
        counts += tl.where(reached, 1.0, 0.0)
        if IS_MASS:
            weights += tl.where(reached, tl.exp(values - largest), 0.0)
    total = tl.sum(counts, axis=1)
    return total, tl.sum(weights, axis=1) if IS_MASS else total


@triton.jit
def _collect(logits, width, candidates, low, high):
    """Copy the logits in [low, high), which fit, to candidates and return their number."""
    count = 0
    for start in range(0, width, _COLLECT_BLOCK):
        place = start + tl.arange(0, _COLLECT_BLOCK)
        values = tl.load(logits + place, mask=place < width, other=float("-inf"))
        inside = (values >= low) & (values < high)
        found = inside.to(tl.int32)
        tl.store(candidates + count + tl.cumsum(found, axis=0) - 1, values, mask=inside)
        count += tl.sum(found, axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def _bisect(candidates, count, low, high, largest, target, IS_MASS: tl.constexpr):
    """Return the largest t in [low, high) whose candidates reach target."""
    place = tl.arange(0, MAX_CANDIDATES)
    values = tl.load(candidates + place, mask=place < count, other=float("-inf"))
    weights = tl.where(place < count, tl.exp(values - largest) if IS_MASS else 1.0, 0.0)
    keys = _to_key(values)
    low_key, high_key = _to_key(low), _to_key(high)
    while high_key - low_key > 1:
        middle = (low_key + high_key) >> 1
        reached = tl.sum(tl.where(keys >= middle, weights, 0.0), axis=0) >= target
        low_key = tl.where(reached, middle, low_key)
        high_key = tl.where(reached, high_key, middle)
    tl.debug_barrier()
    return _from_key(low_key)


@triton.jit
def _to_key(value):
    """Return int64 keys in the order of float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _from_key(key):
    """Return the float32 value of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
