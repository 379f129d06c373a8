# SPDX-License-Identifier: Apache-2.0
"""The strings and numbers that a JSON schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from blink.grammar.errors import GrammarError
from blink.grammar.expression import NEVER, Chars, Expression, Multiple, Repeat, Series, choice, optional, series
from blink.grammar.formats import PATTERNS
from blink.grammar.json_text import INTEGER, NUMBER, inside_string, string
from blink.grammar.numbers import Bounds, decimals, integers
from blink.grammar.regex import char_bounds, parse_regex

_MAX_DIVISOR = 1000
_MAX_LISTED = 1000  # multiples between two bounds


def compile_string(schema: Mapping[str, Any]) -> Expression:
    """Return the strings that a schema allows."""
    least, most = count_bounds(schema, "minLength", "maxLength")
    if most is not None and least > most:
        return NEVER
    if "pattern" in schema:
        pattern = _within(parse_regex(schema["pattern"], searches=True), least, most)
        return series('"', inside_string(pattern), '"')
    if least == 0 and most is None and schema.get("format") in PATTERNS:
        return series('"', inside_string(parse_regex(PATTERNS[schema["format"]])), '"')
    return string(least, most)


def _within(pattern: Expression, least: int, most: int | None) -> Expression:
    """Return the texts of a pattern that have a number of characters."""
    if least == 0 and most is None:
        return pattern
    parts = [part for part in pattern.parts if not _is_empty(part)] if isinstance(pattern, Series) else [pattern]
    if len(parts) == 1 and isinstance(parts[0], Repeat) and isinstance(parts[0].part, Chars):
        repeat = parts[0]
        low = max(repeat.least, least)
        high = repeat.most if most is None else most if repeat.most is None else min(repeat.most, most)
        return NEVER if high is not None and low > high else Repeat(repeat.part, low, high)
    low, high = char_bounds(pattern)
    if low >= least and (most is None or (high is not None and high <= most)):
        return pattern
    raise GrammarError("a pattern together with a minLength or maxLength that it does not keep itself")


def _is_empty(expression: Expression) -> bool:
    return char_bounds(expression) == (0, 0)


def compile_number(schema: Mapping[str, Any], *, is_integer: bool) -> Expression:
    """Return the numbers that a schema allows."""
    bounds = _number_bounds(schema)
    divisor = schema.get("multipleOf")
    if divisor is not None:
        return _multiples(divisor, bounds)
    if bounds.low is None and bounds.high is None:
        return INTEGER if is_integer else NUMBER
    return integers(bounds) if is_integer else decimals(bounds)


def _number_bounds(schema: Mapping[str, Any]) -> Bounds:
    low, low_is_open = _tightest(schema, "minimum", "exclusiveMinimum", 1)
    high, high_is_open = _tightest(schema, "maximum", "exclusiveMaximum", -1)
    return Bounds(low, low_is_open, high, high_is_open)


def _tightest(schema: Mapping[str, Any], closed: str, opened: str, sign: int) -> tuple[Decimal | None, bool]:
    limit, exclusive = schema.get(closed), schema.get(opened)
    if isinstance(exclusive, bool):  # of draft 4
        return _decimal(limit), exclusive and limit is not None
    candidates = [(_decimal(value), is_open) for value, is_open in ((limit, False), (exclusive, True))]
    known = [(value, is_open) for value, is_open in candidates if value is not None]
    return max(known, key=lambda bound: (sign * bound[0], bound[1])) if known else (None, False)


def _decimal(value: Any) -> Decimal | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GrammarError("a bound of numbers must be a number")
    found = Decimal(repr(value))
    if not found.is_finite() or abs(found.adjusted()) > 40:
        raise GrammarError(f"a bound of numbers is too large or too small: {value}")
    return found


def _multiples(divisor: Any, bounds: Bounds) -> Expression:
    step = _decimal(divisor)
    if step is None or step <= 0 or step != int(step):
        raise GrammarError("multipleOf must be a positive whole number here")
    size = int(step)
    first, last = bounds.scaled(0)
    if bounds.low is not None and bounds.high is not None:
        values = range(-(-first // size) * size, last + 1, size)
        if len(values) <= _MAX_LISTED:
            return choice([str(value) for value in values])
    # Without an upper bound there is no end of multiples: from where they start, they are as digits go.
    if size > _MAX_DIVISOR or bounds.high is not None or (bounds.low is not None and first not in (0, 1)):
        raise GrammarError("multipleOf together with these bounds")
    if bounds.low is None:
        return series(optional(series("-")), Multiple(size))
    if first == 1:
        raise GrammarError("multipleOf together with a lower bound above 0")
    return Multiple(size)


def count_bounds(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return two keywords that count something; None: no limit.

    Raises:
        GrammarError: they are no counts.
    """
    for name in (least, most):
        value = schema.get(name)
        if value is not None and (isinstance(value, bool) or value != int(value) or value < 0):
            raise GrammarError(f"{name!r} must be a count, got {value}")
    high = schema.get(most)
    return int(schema.get(least) or 0), None if high is None else int(high)
