# SPDX-License-Identifier: Apache-2.0
"""Sets of numbers: exact for those without an exponent; of others, by their sign and size, as far as that decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.expression import NEVER, Expression, Regular, Repeat, Text, choice, optional, series
from blink.grammar.language import NO_TEXTS, Language, make_language, texts
from blink.grammar.pattern import language_of, pattern_language

_MAX_STATES = 20_000
_MAX_DIGITS = 400


def _language(pattern: str) -> Language:
    return pattern_language(pattern, searches=False)


# The universe: every number without an exponent, in each way in which it is written.
def _plain() -> Language:
    return _language(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


def _whole() -> Language:
    """Return whole numbers, in each way in which they are written without an exponent."""
    return _language(r"-?(0|[1-9][0-9]*)(\.0+)?")


def _integer_texts() -> Language:
    return _language(r"-?(0|[1-9][0-9]*)")


def _distinct_texts() -> Language:
    fractions = _language(r"-?(0|[1-9][0-9]*)\.[0-9]*[1-9]") & _language(r"-?[0-9.]{1,16}")
    return _language(r"0|-?[1-9][0-9]*") | fractions


_EXPONENT = r"([0-9]{1,2}|[12][0-9]{2}|30[0-7])"  # beyond, a double may have no such number
# Numbers with an exponent and one digit before the point, by sign and by whether they are below 1 in size.
_CLASSES = {
    (sign, is_small): ("-" if sign < 0 else "")
    + r"[1-9](\.[0-9]+)?[eE]"
    + (r"-(0?[1-9]|[1-9][0-9]|[12][0-9]{2}|30[0-7])" if is_small else rf"\+?{_EXPONENT}")
    for sign in (-1, 1)
    for is_small in (False, True)
}
_ANY_NUMBER = rf"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?{_EXPONENT})?"
Certainty = bool | None  # None: of some it is true
_ALL: tuple[Certainty, ...] = (True,) * len(_CLASSES)
_NONE: tuple[Certainty, ...] = (False,) * len(_CLASSES)
_SOME: tuple[Certainty, ...] = (None,) * len(_CLASSES)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers.

    unlisted: those without an exponent; whoever is in it is there in each way of writing it.
    scientific: of each of the classes with an exponent, whether its numbers are in the set.
    listed: the numbers, as they are written, if they are some that were named; then `unlisted` is not used.
    """

    unlisted: Language
    scientific: tuple[Certainty, ...]
    listed: tuple[str, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Say whether it is plain that there is no number."""
        if self.listed is not None:
            return not self.listed
        return self.unlisted.is_empty and not any(each in (True, None) for each in self.scientific)

    @property
    def plain(self) -> Language:
        """Return the numbers without an exponent, in each way of writing them."""
        return self.unlisted if self.listed is None else _all_texts(self.listed)

    def __and__(self, other: Numbers) -> Numbers:
        for one, beside in ((self, other), (other, self)):
            if one.listed is not None and beside.listed is not None:
                known = set(beside.listed)
                return _listed(text for text in one.listed if text in known)
            if one.listed is not None:
                return _listed(text for text in one.listed if beside.plain.matches(text))
        both = [_and(a, b) for a, b in zip(self.scientific, other.scientific, strict=True)]
        return Numbers(self.plain & other.plain, tuple(both))

    def __or__(self, other: Numbers) -> Numbers:
        if self.listed is not None and other.listed is not None:
            return _listed([*self.listed, *other.listed])
        either = [_not(_and(_not(a), _not(b))) for a, b in zip(self.scientific, other.scientific, strict=True)]
        return Numbers(self.plain | other.plain, tuple(either))

    def others(self) -> Numbers:
        """Return all numbers that are not in the set."""
        return Numbers(_plain() - self.plain, tuple(_not(each) for each in self.scientific))

    @property
    def distinct(self) -> Language:
        """Return one text of each number; of those that are not listed, no two are the same in a double, either."""
        return self.plain & _distinct_texts() if self.listed is None else texts(self.listed)

    def expression(self) -> Expression:
        """Return how the numbers are written: whole ones without a point, if there are no others."""
        if self.listed is not None:
            return choice(self.listed)
        if self.scientific == _ALL and self.unlisted == _plain():
            return Regular(_language(_ANY_NUMBER))
        plain = self.unlisted
        if (plain - _whole()).is_empty:
            plain = plain & _integer_texts()
        for pattern, is_in in zip(_CLASSES.values(), self.scientific, strict=True):
            if is_in:
                plain = plain | _language(pattern)
        return NEVER if plain.is_empty else Regular(plain)


def all_numbers() -> Numbers:
    """Return all numbers."""
    return Numbers(_plain(), _ALL)


def no_numbers() -> Numbers:
    """Return none."""
    return Numbers(NO_TEXTS, _NONE, ())


def whole_numbers() -> Numbers:
    """Return all whole numbers."""
    return Numbers(_whole(), _SOME)


def named(values: Iterable[Any]) -> Numbers:
    """Return some numbers."""
    return _listed(_text_of(value) for value in values)


def _listed(known: Iterable[str]) -> Numbers:
    different = tuple(dict.fromkeys(known))
    return Numbers(NO_TEXTS, _SOME, different) if different else no_numbers()


@lru_cache(maxsize=256)
def _all_texts(known: tuple[str, ...]) -> Language:
    """Return some numbers in each way of writing them without an exponent."""
    if not known:
        return NO_TEXTS
    options: list[Expression] = []
    for text in known:
        whole, _, fraction = text.partition(".")
        zeros = Repeat(Text(b"0"), 0, None)
        options.append(
            series(whole, ".", fraction, zeros) if fraction else series(whole, optional(series(".0", zeros)))
        )
        if not whole.strip("-0") and not fraction:
            options.append(series("-0", optional(series(".0", zeros))))
    return language_of(choice(options))


def at_least(bound: Any, *, is_open: bool) -> Numbers:
    """Return the numbers from a bound on; is_open: without itself."""
    return _bounded(_decimal(bound), 1, is_open=is_open)


def at_most(bound: Any, *, is_open: bool) -> Numbers:
    """Return the numbers up to a bound; is_open: without itself."""
    return _bounded(_decimal(bound), -1, is_open=is_open)


def _bounded(bound: Decimal, sign: int, *, is_open: bool) -> Numbers:
    decided: list[Certainty] = []
    for side, is_small in _CLASSES:
        if is_small:  # 0 < x < 1 on its side
            low, high = (Decimal(0), Decimal(1)) if side > 0 else (Decimal(-1), Decimal(0))
            # The ends are not in the class.
            is_in, is_out = (low >= bound, high <= bound) if sign > 0 else (high <= bound, low >= bound)
        elif side == sign:  # from 1 on in the direction of the set
            is_in, is_out = sign * bound <= 1 and not (is_open and sign * bound == 1), False
        else:
            is_in, is_out = False, -sign * bound < 1 or (is_open and -sign * bound == 1)
        decided.append(True if is_in else False if is_out else None)
    return Numbers(_beyond(bound, sign, is_open=is_open), tuple(decided))


def multiples(divisor: Any) -> Numbers:
    """Return the multiples of a number.

    Raises:
        GrammarError: it is not above 0, or has too many digits.
    """
    step = _decimal(divisor)
    if step <= 0:
        raise GrammarError("multipleOf must be above 0")
    return Numbers(_multiples(step.normalize()), _SOME)


def _and(one: Certainty, other: Certainty) -> Certainty:
    if one is False or other is False:
        return False
    return True if one and other else None


def _not(one: Certainty) -> Certainty:
    return None if one is None else not one


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise GrammarError("a bound of numbers must be a number")
    if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
        raise GrammarTooLargeError(f"a number has more than {_MAX_DIGITS} digits")
    found = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not found.is_finite():
        raise GrammarError("a number is not finite")
    if abs(found.adjusted()) + len(found.as_tuple().digits) > _MAX_DIGITS:
        raise GrammarTooLargeError(f"a number has more than {_MAX_DIGITS} digits")
    return found


def _text_of(value: Any) -> str:
    """Return a number without an exponent, and without zeros at its end behind the point: equal numbers are equal."""
    text = f"{_decimal(value):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


@lru_cache(maxsize=1024)
def _beyond(bound: Decimal, sign: int, *, is_open: bool) -> Language:
    """Return the plain numbers on one side of a bound: those above it if `sign` is 1."""
    size = abs(bound)
    larger = _larger(size) if is_open else _larger(size) | _equal(size)
    if bound == 0:
        return _signed(larger, sign) | (NO_TEXTS if is_open else _signed(_equal(size), -sign))
    if (bound > 0) == (sign > 0):
        return _signed(larger, sign)
    smaller = _unsigned() - (_larger(size) | _equal(size) if is_open else _larger(size))
    return _signed(_unsigned(), sign) | _signed(smaller, -sign)


def _unsigned() -> Language:
    return _language(r"(0|[1-9][0-9]*)(\.[0-9]+)?")


def _signed(sizes: Language, sign: int) -> Language:
    return sizes if sign > 0 else language_of(series("-", Regular(sizes)))


def _digits_of(size: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{size:f}".partition(".")
    return whole, fraction.rstrip("0")


def _equal(size: Decimal) -> Language:
    whole, fraction = _digits_of(size)
    return _language(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")


def _larger(size: Decimal) -> Language:
    """Return larger sizes: those with more digits, and those that are larger in their first other digit."""
    whole, fraction = _digits_of(size)
    any_fraction = r"(\.[0-9]+)?"
    options = [rf"[1-9][0-9]{{{len(whole)}}}[0-9]*{any_fraction}"]
    for place, digit in enumerate(whole):
        if digit < "9":
            options.append(rf"{whole[:place]}[{int(digit) + 1}-9][0-9]{{{len(whole) - place - 1}}}{any_fraction}")
    for place, digit in enumerate(fraction):
        if digit < "9":
            options.append(rf"{whole}\.{fraction[:place]}[{int(digit) + 1}-9][0-9]*")
    options.append(rf"{whole}\.{fraction}0*[1-9][0-9]*")
    return _language("|".join(options))


@lru_cache(maxsize=256)
def _multiples(step: Decimal) -> Language:
    """Return the plain multiples of a number: a state for each remainder of the digits so far."""
    exponent = int(step.as_tuple().exponent)
    unit = int(step.scaleb(-exponent)) * 10 ** max(exponent, 0)
    num_decimals = max(-exponent, 0)
    if unit * (num_decimals + 1) > _MAX_STATES:
        raise GrammarTooLargeError("multipleOf has too many digits")
    # Numbers before the point are 0 .. unit - 1; behind `count` decimals they follow; then only zeros may come.
    finals: list[int] = []
    edges: list[tuple[int, int, int, int]] = []
    for count in range(num_decimals + 1):
        for rest in range(unit):
            state = count * unit + rest
            finals.append(int(rest * 10 ** (num_decimals - count) % unit == 0))
            for digit in range(10):
                after = (10 * rest + digit) % unit
                if count == 0:
                    edges.append((state, 0x30 + digit, 0x30 + digit, after))
                elif count < num_decimals:
                    edges.append((state, 0x30 + digit, 0x30 + digit, (count + 1) * unit + after))
                elif digit == 0 and rest == 0:
                    edges.append((state, 0x30, 0x30, state))
            if count == 0:
                edges.append((state, 0x2E, 0x2E, -1 - rest))
    # Behind the point, before its first decimal; without decimals only zeros may come.
    first = len(finals)
    points = [first + rest for rest in range(unit)]
    for rest in range(unit):
        finals.append(0)
        for digit in range(10):
            after = unit + (10 * rest + digit) % unit if num_decimals else first + unit
            if num_decimals or (digit == 0 and rest == 0):
                edges.append((points[rest], 0x30 + digit, 0x30 + digit, after))
    finals.append(1)
    edges.append((first + unit, 0x30, 0x30, first + unit))
    resolved = [(a, low, high, points[-1 - b] if b < 0 else b) for a, low, high, b in edges]
    sizes = make_language(finals, resolved) & _unsigned()
    return sizes | _signed(sizes, -1)
