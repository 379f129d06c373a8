# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the frequencies that a model's configuration asks for. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_SMALLEST_FACTOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    @property
    def factors(self) -> list[float]:
        """What must be finite and positive: between the two frequencies the scaling is blended."""
        width = self.high_freq_factor - self.low_freq_factor
        return [self.factor, width] if width else [self.factor]

    def divisor(self, frequency: float) -> float:
        """Return what the frequency (radians per token) is divided by."""
        turns = self.original_max_len * frequency / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = (turns - self.low_freq_factor) / width if width else float(turns >= self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return 1 / ((1 - kept) / self.factor + kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All wavelengths are stretched by `factor`."""

    factor: float

    @property
    def factors(self) -> list[float]:
        """What must be finite and positive."""
        return [self.factor]

    def divisor(self, frequency: float) -> float:  # noqa: ARG002 - the same for all frequencies
        """Return what the frequency (radians per token) is divided by."""
        return self.factor


# What YaRN's numbers may be; far beyond what models have, and so that no sum of them overflows or vanishes.
YARN_FACTORS = (1e-3, 1e6)
YARN_TURNS = (1e-3, 1e6)
YARN_MIN_THETA = 1.01


def yarn_divisors(
    *, theta: float, rotary_dim: int, factor: float, original_max_len: int, turns: tuple[float, float], truncate: bool
) -> tuple[float, ...]:
    """Return YaRN's divisor of each frequency (arXiv 2309.00071).

    Pairs that make more than turns[0] turns in the original context are kept, those with fewer than turns[1] stretched
    by `factor`, those between blended; `truncate` rounds the ends of the blend outwards.
    """
    first, last = (
        rotary_dim * math.log(original_max_len / (count * 2 * math.pi)) / (2 * math.log(theta)) for count in turns
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    ramp = (min(max((pair - first) / width, 0.0), 1.0) for pair in range(rotary_dim // 2))
    return tuple(1 / (stretched / factor + 1 - stretched) for stretched in ramp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Describe the rotation of the first `rotary_dim` components of each head (pairs i, i + rotary_dim / 2)."""

    theta: float
    rotary_dim: int
    scaling: Llama3Scaling | LinearScaling | None = None
    divisors: tuple[float, ...] = ()  # one per frequency: YaRN, LongRoPE, and as GGUF files store Llama 3.1's scaling
    long_divisors: tuple[float, ...] = ()  # LongRoPE's, for a context longer than original_max_len
    original_max_len: int = 0
    magnitude: float = 1.0  # by which YaRN and LongRoPE lengthen rotated queries and keys
    still: int = 0  # how many of the last pairs are not rotated

    def is_sound(self) -> bool:
        """Return whether `frequencies` has a result: numbers that are finite and positive."""
        factors = [*self.divisors, *self.long_divisors, self.magnitude, *(self.scaling.factors if self.scaling else ())]
        has_all = all(len(part) in (0, self.rotary_dim // 2) for part in (self.divisors, self.long_divisors))
        has_all = has_all and 0 <= self.still <= self.rotary_dim // 2
        return has_all and self.theta >= 1 and all(_SMALLEST_FACTOR <= factor < math.inf for factor in factors)

    def fit(self, max_model_len: int) -> Rope:
        """Choose LongRoPE's divisors for a context, once: keys in the cache cannot change their rotation."""
        if not self.long_divisors or max_model_len <= self.original_max_len:
            return self
        return replace(self, divisors=self.long_divisors)

    def frequencies(self) -> list[float]:
        """Return the rotary_dim / 2 frequencies in radians per token."""
        pairs = self.rotary_dim // 2
        plain = [self.theta ** (-2 * i / self.rotary_dim) if i < pairs - self.still else 0.0 for i in range(pairs)]
        if self.divisors:
            return [frequency / divisor for frequency, divisor in zip(plain, self.divisors, strict=True)]
        if self.scaling is not None:
            return [frequency / self.scaling.divisor(frequency) for frequency in plain]
        return plain


def unrotated(head_dim: int) -> Rope:
    """Return what rotates nothing, of layers without a rotary embedding: so that kernels need no other code."""
    return Rope(theta=1.0, rotary_dim=head_dim, still=head_dim // 2)
