# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingParameterType=false
"""The Gumbel noise of csrc/sampler/draw.h inside GPU kernels: the same counters, keys and mapping."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl

_WORD_STEP = tl.constexpr(2**-32)
_LARGEST = tl.constexpr(1 - 2**-24)


@triton.jit
def make_gumbel(first, step, key_low, key_high, BLOCK: tl.constexpr):
    """Return the noise of vocabulary indices first .. first + BLOCK (multiples of 4): four from each counter."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    length = zero + step.to(tl.uint32)
    key_low, key_high = zero + key_low.to(tl.uint32, bitcast=True), zero + key_high.to(tl.uint32, bitcast=True)
    word0, word1, word2, word3 = philox_impl(counter, zero, length, zero, key_low, key_high)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return _gumbel(tl.reshape(words, (BLOCK,)))


@triton.jit
def _gumbel(word):
    v = tl.minimum((word.to(tl.float32) + 0.5) * _WORD_STEP, _LARGEST)
    return -tl.log(-_log1p(-v))


@triton.jit
def _log1p(x):
    # Kahan's form: the rounding error of 1 + x cancels in the quotient.
    total = 1.0 + x
    quotient = tl.log(total) * x / tl.where(total == 1.0, 1.0, total - 1.0)
    return tl.where(total == 1.0, x, quotient)
