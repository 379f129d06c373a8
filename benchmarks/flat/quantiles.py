# SPDX-License-Identifier: Apache-2.0
"""Statistics of the flat protocol: percentiles, histograms with log bins and their CCDF, bootstrap intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
_BINS_PER_DECADE: Final = 40
_LEAST_MS: Final = 1e-3  # events that came in one read have no gap between them
_RESAMPLES: Final = 2000


def describe(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99, p99.9 and max of some values; nothing where there is none."""
    if not len(values):
        return {}
    found = np.percentile(np.asarray(values, float), PERCENTILES)
    named = {f"p{percentile:g}": float(value) for percentile, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": float(max(values))}


def histogram(milliseconds: Sequence[float]) -> dict[str, int]:
    """Count values in bins of 1/40 of a decade. A key is the bin's number: its lower edge is 10^(number / 40) ms."""
    values = np.maximum(np.asarray(milliseconds, float), _LEAST_MS)
    numbers = np.floor(np.log10(values) * _BINS_PER_DECADE + 1e-9).astype(int)
    return {str(number): count for number, count in sorted(Counter(numbers.tolist()).items())}


def merge(histograms: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add up histograms."""
    total: Counter[str] = Counter()
    for one in histograms:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))


def ccdf(counts: Mapping[str, int]) -> list[tuple[float, float]]:
    """Return the share of the values that are not below each bin's lower edge in ms: points ascending in x."""
    total, above = sum(counts.values()), sum(counts.values())
    points: list[tuple[float, float]] = []
    for number, count in sorted((int(number), count) for number, count in counts.items()):
        points.append((10 ** (number / _BINS_PER_DECADE), above / total))
        above -= count
    return points


def bootstrap(
    values: Sequence[float],
    base: Sequence[float] = (),
    *,
    statistic: Callable[..., np.ndarray] = np.median,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of a statistic over runs, or with `base` of the ratio of both statistics.

    Fewer than three runs have none.
    """
    if min(len(values), len(base) or len(values)) < 3:
        return None
    rng = np.random.default_rng(seed)
    found = _resample(np.asarray(values, float), statistic, rng)
    if len(base):
        found = found / _resample(np.asarray(base, float), statistic, rng)
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)


def _resample(values: np.ndarray, statistic: Callable[..., np.ndarray], rng: np.random.Generator) -> np.ndarray:
    return statistic(values[rng.integers(0, len(values), (_RESAMPLES, len(values)))], axis=1)
