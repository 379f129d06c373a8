# SPDX-License-Identifier: Apache-2.0
"""What the sampling parameters of csrc/sampler/params.h are unless told, and what they may be."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

from blink.region.layout import SAMPLING, TABLE


class Range(NamedTuple):
    """What a sampling parameter is unless told, and what it may be."""

    default: float
    low: float
    high: float
    holds_low: bool

    def __str__(self) -> str:
        return f"{'[' if self.holds_low else '('}{self.low:.15g}, {self.high:.15g}]"

    def holds(self, value: float) -> bool:
        """Tell whether a value is within the range, and stays there in the engine's float32; no NaN is."""
        return self.low <= value <= self.high and (self.holds_low or _as_native(value) > self.low)


def _read_range(name: str, default: float, low: float, high: float, holds_low: bool) -> Range:
    kind = float if SAMPLING[name].kind == "f" else int
    return Range(kind(default), kind(low), kind(high), holds_low)


# The parameters that csrc/sampler/params.h lists, in its order.
SAMPLING_RANGES: Mapping[str, Range] = {name: _read_range(name, *values) for name, values in TABLE["sampling"].items()}


def _as_native(value: float) -> float:
    """Return the value as the engine gets it: tiny ones become 0 in float32."""
    return ctypes.c_float(value).value
