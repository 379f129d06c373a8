# SPDX-License-Identifier: Apache-2.0
"""Lengths of prompts and answers in tokens: log-normal with a given mean after clipping, or fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from blink.bench.config import LoadConfig

# Skewed as conversations are; the bounds are those within which vLLM's benchmark keeps ShareGPT's.
INPUT_SIGMA: Final = 1.1
OUTPUT_SIGMA: Final = 0.9
SHORTEST: Final = 4
LONGEST_INPUT: Final = 1024
LONGEST_TOTAL: Final = 2048


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one prompt and of the answer asked for."""

    input_len: int
    output_len: int


def draw_lengths(load: LoadConfig, num_requests: int, rng: np.random.Generator) -> list[Lengths]:
    """Draw lengths as configured, not yet cut to what the model takes."""
    if load.dataset_name == "random":
        return [Lengths(load.random_input_len, load.random_output_len)] * num_requests
    inputs = _draw_lognormal(load.mean_input_len, INPUT_SIGMA, LONGEST_INPUT, num_requests, rng)
    outputs = _draw_lognormal(load.mean_output_len, OUTPUT_SIGMA, LONGEST_TOTAL - LONGEST_INPUT, num_requests, rng)
    return [Lengths(*pair) for pair in zip(inputs, outputs, strict=True)]


def fit(lengths: Lengths, load: LoadConfig, max_model_len: int) -> Lengths:
    """Apply the fixed lengths of `load`, then cut to what the model takes (0: no limit)."""
    input_len = load.input_len or lengths.input_len
    output_len = load.output_len or lengths.output_len
    if max_model_len:
        output_len = min(output_len, max(1, max_model_len // 2, max_model_len - input_len))
        input_len = min(input_len, max(1, max_model_len - output_len))
    return Lengths(input_len, output_len)


def _draw_lognormal(mean: float, sigma: float, high: int, number: int, rng: np.random.Generator) -> list[int]:
    low = min(SHORTEST, int(mean))
    high = max(high, 4 * int(mean))
    drawn = rng.lognormal(_solve_mu(mean, sigma, low, high), sigma, number)
    return np.rint(np.clip(drawn, low, high)).astype(int).tolist()


def _solve_mu(mean: float, sigma: float, low: float, high: float) -> float:
    """Find the parameter with which a clipped log-normal variable has this mean, by bisection."""
    below, above = math.log(low) - 10 * sigma, math.log(high) + 10 * sigma
    for _ in range(80):
        middle = (below + above) / 2
        if _clipped_mean(middle, sigma, low, high) < mean:
            below = middle
        else:
            above = middle
    return (below + above) / 2


def _clipped_mean(mu: float, sigma: float, low: float, high: float) -> float:
    z_low, z_high = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    inside = math.exp(mu + sigma**2 / 2) * (_normal(z_high - sigma) - _normal(z_low - sigma))
    return low * _normal(z_low) + inside + high * (1 - _normal(z_high))


def _normal(z: float) -> float:
    """The distribution function of the standard normal distribution."""
    return (1 + math.erf(z / math.sqrt(2))) / 2
