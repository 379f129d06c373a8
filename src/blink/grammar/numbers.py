# SPDX-License-Identifier: Apache-2.0
"""Numbers between bounds, as the digits that they are written with."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import NamedTuple

from blink.grammar.expression import NEVER, Expression, chars, choice, series

_MAX_DIGITS = 15
_MAX_DECIMALS = 6
_LEAST_DECIMALS = 3


class Bounds(NamedTuple):
    """What a number may be; None: no limit."""

    low: Decimal | None
    low_is_open: bool
    high: Decimal | None
    high_is_open: bool

    def scaled(self, decimals: int) -> tuple[int, int]:
        """Return the first and the last number, in units of the last of so many decimals."""
        low = self.low if self.low is not None else Decimal(1 - 10**_MAX_DIGITS)
        high = self.high if self.high is not None else Decimal(10**_MAX_DIGITS - 1)
        if self.high is None:
            high = max(high, 10 * abs(low))
        if self.low is None:
            low = min(low, -10 * abs(high))
        low, high = low.scaleb(decimals), high.scaleb(decimals)
        first, last = low.to_integral_value(ROUND_CEILING), high.to_integral_value(ROUND_FLOOR)
        first += self.low_is_open and first == low
        last -= self.high_is_open and last == high
        return int(first), int(last)


def integers(bounds: Bounds) -> Expression:
    """Return the whole numbers within bounds."""
    return _signed(*bounds.scaled(0), 0)


def decimals(bounds: Bounds) -> Expression:
    """Return numbers within bounds: whole ones, and those with up to some decimals."""
    given = [-int(bound.as_tuple().exponent) for bound in (bounds.low, bounds.high) if bound is not None]
    most = min(max([_LEAST_DECIMALS, *given]), _MAX_DECIMALS)
    return choice([_signed(*bounds.scaled(count), count) for count in range(most + 1)])


def _signed(first: int, last: int, num_decimals: int) -> Expression:
    options: list[Expression] = []
    if last >= 0:
        options.append(_unsigned(max(first, 0), last, num_decimals))
    if first < 0:
        # There is no -0, which some readers take for another number.
        options.append(series("-", _unsigned(max(-last, 1), -first, num_decimals)))
    return choice(options) if first <= last else NEVER


def _unsigned(first: int, last: int, num_decimals: int) -> Expression:
    options: list[Expression] = []
    shortest = num_decimals + 1
    for length in range(max(len(str(first)), shortest), max(len(str(last)), shortest) + 1):
        low = max(first, 10 ** (length - 1) if length > shortest else 0)
        high = min(last, 10**length - 1)
        if low <= high:
            options.append(_between(f"{low:0{length}}", f"{high:0{length}}", num_decimals))
    return choice(options)


def _between(low: str, high: str, num_decimals: int) -> Expression:
    """Return the texts of digits between two of one length, with a point before the decimals."""
    if not low:
        return series()
    point = "." if len(low) == num_decimals else ""
    rest = len(low) - 1
    if low[0] == high[0]:
        return series(point, low[0], _between(low[1:], high[1:], num_decimals))
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return series(point, _digits(low[0], high[0]), _any_digits(rest, num_decimals))
    options = [series(point, low[0], _between(low[1:], "9" * rest, num_decimals))]
    if ord(high[0]) - ord(low[0]) > 1:
        middle = _digits(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))
        options.append(series(point, middle, _any_digits(rest, num_decimals)))
    options.append(series(point, high[0], _between("0" * rest, high[1:], num_decimals)))
    return choice(options)


def _any_digits(count: int, num_decimals: int) -> Expression:
    parts = [part for left in range(count, 0, -1) for part in ("." if left == num_decimals else "", _digits("0", "9"))]
    return series(*parts)


def _digits(low: str, high: str) -> Expression:
    return chars((ord(low), ord(high)))
