# SPDX-License-Identifier: Apache-2.0
"""Philox against the known answers of Random123, and the noise made from it."""

from __future__ import annotations

import math

import pytest
import torch

from sampling_noise import gumbel, gumbel_of_vocabulary, make_gumbel, philox

# "philox4x32 10" of Random123's kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([int(word, 16)]) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    found = philox((c0, c1, c2, c3), (k0, k1))
    assert " ".join(f"{int(word):08x}" for word in found) == answer


def test_noise_of_an_index_is_made_from_its_own_word_of_its_own_counter() -> None:
    key, step = (0x12345678, 0x9ABCDEF0), 77
    noise = gumbel(torch.tensor([0, 3, 10, 4095]), key, step)
    for index, found in zip((0, 3, 10, 4095), noise.tolist(), strict=True):
        c0, zero, c2 = torch.tensor([index // 4]), torch.tensor([0]), torch.tensor([step])
        word = int(philox((c0, zero, c2, zero), key)[index % 4])
        assert found == pytest.approx(-math.log(-math.log1p(-(word + 0.5) / 2**32)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 4, 1001])
def test_noise_of_the_vocabulary_equals_that_of_single_indices(vocab_size: int) -> None:
    everything = gumbel_of_vocabulary(vocab_size, (5, 6), 7, torch.device("cpu"))
    torch.testing.assert_close(everything, gumbel(torch.arange(vocab_size), (5, 6), 7), rtol=0, atol=0)


def test_noise_follows_the_gumbel_distribution() -> None:
    count = 1 << 17
    noise = gumbel_of_vocabulary(count, (1, 2), 3, torch.device("cpu")).double()
    levels = (-(-noise).exp()).exp().sort().values  # uniform if the noise is Gumbel
    distance = (levels - (torch.arange(count) + 0.5) / count).abs().max()
    # The Kolmogorov-Smirnov distance of true samples exceeds this once in 100,000 seeds.
    assert float(distance) < 2.47 / math.sqrt(count)


def test_noise_grows_as_the_word_falls_and_is_finite_at_both_ends() -> None:
    noise = make_gumbel(torch.tensor([2**32 - 1, 2**31, 1000, 1, 0]))
    assert noise.isfinite().all()
    assert (noise.diff() > 0).all()
