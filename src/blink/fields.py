# SPDX-License-Identifier: Apache-2.0
"""Read values out of a model's description, each with its type and range checked: the file may come from a stranger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blink.errors import ConfigError

_MAX_INTEGER = 2**31 - 1
_SHOWN_CHARS = 60
_SAID_CHARS = 300


class Fields:
    """The values of one file; `prefix` stands before each key, an absent or null value counts as missing.

    Every method raises a ConfigError for a value of another type or range, or that is missing without a default.
    """

    def __init__(self, values: Mapping[str, Any], place: str, prefix: str = "") -> None:
        self.place = place
        self._values = values
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = _MAX_INTEGER) -> int:
        """Return a whole number from low to high."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e300) -> float:
        """Return a finite number from low to high."""
        value = self._find(key, default)
        # NaN fails any comparison; float() of an int of any length could overflow.
        if not _is_number(value) or not low <= value <= high:
            rule = f"a number of at least {low:g}" if high == 1e300 else f"a number from {low:g} to {high:g}"
            raise self._wrong(key, value, rule)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def flags(self, key: str) -> list[bool]:
        """Return a list of true and false, an empty one if there is none or a number in its place."""
        value = self._values.get(self._prefix + key)
        if value is None or _is_number(value):
            return []
        if not isinstance(value, list) or not all(isinstance(item, bool) for item in value):
            raise self._wrong(key, value, "a list of true and false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._find(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return a list of strings."""
        value = self._find(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def integers(self, key: str, default: list[int] | None = None, *, as_list: bool = False) -> list[int]:
        """Return a list of whole numbers; a single number counts as one where `as_list` says so."""
        value = self._find(key, default)
        value = [value] if as_list and not isinstance(value, list) else value
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, value, "a list of whole numbers")
        return value

    def numbers(self, key: str, *, low: float = 0.0) -> list[float]:
        """Return a list of finite numbers of at least low."""
        value = self._find(key, None)
        if not isinstance(value, list) or not all(_is_number(item) and low <= item <= 1e300 for item in value):
            raise self._wrong(key, value, f"a list of numbers of at least {low:g}")
        return [float(item) for item in value]

    def is_unbounded(self, key: str) -> bool:
        """Return whether a pair of limits, or none, lets all pass that is at least 0."""
        return self._values.get(self._prefix + key) in (
            None,
            [0, math.inf],
            [0, "Infinity"],
            [0, {"__float__": "Infinity"}],
        )

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the object under a key, an empty one if there is none."""
        value = self._find(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def mappings(self, key: str) -> list[Mapping[str, Any]]:
        """Return a list of objects."""
        value = self._find(key, None)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, value, "a list of objects")
        return value

    def override(self, values: Mapping[str, Any]) -> Fields:
        """Return these values with others over them."""
        return Fields({**self._values, **values}, self.place, self._prefix)

    def has(self, key: str) -> bool:
        """Return whether there is a value."""
        return self._values.get(self._prefix + key) is not None

    def require(self, condition: bool, what: str) -> None:
        """Refuse a model that needs what Blink does not do."""
        if not condition:
            raise ConfigError(f"{self.place}: {what} is not supported; use another model.")

    def _find(self, key: str, default: object) -> Any:
        value = self._values.get(self._prefix + key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.place}: '{self._prefix}{key}' is missing; download or convert the model again.")
        return value

    def _wrong(self, key: str, value: object, rule: str) -> ConfigError:
        shown = show(value)
        return ConfigError(f"{self.place}: '{self._prefix}{key}' must be {rule}, but is {shown}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_line(error: BaseException) -> str:
    """Return what a library says of a file, which may quote it, on one line."""
    return " ".join(str(error).split())[:_SAID_CHARS]


def show(value: object) -> str:
    """Return a value as it stands in an error message: on one line, and short."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of very many digits"
    text = f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
