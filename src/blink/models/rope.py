# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the frequencies that a model's configuration asks for. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SMALLEST_FACTOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def divisor(self, frequency: float) -> float:
        """Return what the frequency (radians per token) is divided by."""
        turns = self.original_max_len * frequency / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return 1 / ((1 - kept) / self.factor + kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All wavelengths are stretched by `factor`."""

    factor: float

    def divisor(self, frequency: float) -> float:  # noqa: ARG002 - the same for all frequencies
        """Return what the frequency (radians per token) is divided by."""
        return self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Describe the rotation of the first `rotary_dim` components of each head (pairs i, i + rotary_dim / 2)."""

    theta: float
    rotary_dim: int
    scaling: Llama3Scaling | LinearScaling | None = None
    divisors: tuple[float, ...] = ()  # one per frequency, as GGUF files store the scaling

    def is_sound(self) -> bool:
        """Return whether `frequencies` has a result: numbers that are finite and positive."""
        factors = list(self.divisors)
        if isinstance(self.scaling, Llama3Scaling):
            # Between the two the scaling is blended.
            factors += [self.scaling.factor, self.scaling.high_freq_factor - self.scaling.low_freq_factor]
        elif self.scaling is not None:
            factors.append(self.scaling.factor)
        return self.theta >= 1 and all(_SMALLEST_FACTOR <= factor < math.inf for factor in factors)

    def frequencies(self) -> list[float]:
        """Return the rotary_dim / 2 frequencies in radians per token."""
        plain = [self.theta ** (-2 * i / self.rotary_dim) for i in range(self.rotary_dim // 2)]
        if self.divisors:
            return [frequency / divisor for frequency, divisor in zip(plain, self.divisors, strict=True)]
        if self.scaling is not None:
            return [frequency / self.scaling.divisor(frequency) for frequency in plain]
        return plain
