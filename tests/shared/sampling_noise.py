# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the noise made from it."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four random words of each counter; words are int64 tensors that hold 0 .. 2**32 - 1."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product may exceed int64's range; shifting arithmetically and masking still gives its true high word.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _MASK) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32 & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(indices: Tensor, key: tuple[int, int], step: int) -> Tensor:
    """Return float32 Gumbel noise of vocabulary indices (int64) at one step of the sequence seeded with `key`.

    Index i takes word i % 4 of the counter (i // 4, 0, step, 0), whatever other indices are asked for.
    """
    zero = torch.zeros_like(indices)
    words = philox((indices // 4, zero, zero + step, zero), key)
    word = torch.stack(words).gather(0, (indices % 4)[None])[0]
    return make_gumbel(word)


def gumbel_of_vocabulary(vocab_size: int, key: tuple[int, int], step: int, device: torch.device) -> Tensor:
    """Return the noise of all indices 0 .. vocab_size: four for each counter."""
    counter = torch.arange(-(-vocab_size // 4), device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox((counter, zero, zero + step, zero), key)
    return make_gumbel(torch.stack(words, dim=1).flatten()[:vocab_size])


def make_gumbel(word: Tensor) -> Tensor:
    """Turn random words (int64 that hold 0 .. 2**32 - 1) into float32 Gumbel noise, always finite."""
    # The smallest v wins the exponential race, and float32 is finest near 0. The largest word would round to v = 1,
    # whose noise is -inf: a token that is the only choice could then lose.
    v = word.float().add_(0.5).mul_(2**-32).clamp_(max=1 - 2**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
