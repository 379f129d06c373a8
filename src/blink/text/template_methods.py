# SPDX-License-Identifier: Apache-2.0
"""The methods of Python's values that a chat template may call, each with what it spends before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from markupsafe import Markup

from blink.text.template_budget import (
    ESCAPE_GROWTH,
    ITEM,
    SCALARS,
    Budget,
    bytes_per_char,
    check_key,
    refuse,
    room,
    size,
)

Cost = Callable[..., None]  # of a budget, the object and the call's arguments

_LINE_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_MAX_WIDTH = 1 << 16
_DIGITS = re.compile(r"[0-9]+")
_STARRED = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(?:\*|[0-9]*\.\*)")


def count_lines(text: str) -> int:
    """Return an upper bound of the lines of a text."""
    return 1 + sum(map(text.count, _LINE_BREAKS if not text.isascii() else _LINE_BREAKS[:7]))


def check_width(width: Any) -> int:
    """Return a width that text is padded to."""
    if not isinstance(width, int) or abs(width) > _MAX_WIDTH:
        refuse(f"a width is no integer up to {_MAX_WIDTH}")
    return max(0, width)


def spend_read(budget: Budget, text: str, *args: Any, **kwargs: Any) -> None:
    """Spend what it takes to read a text once and to copy it."""
    for value in (*args, *kwargs.values()):
        budget.operand(value)
    budget.spend(size(text))


def spend_case(budget: Budget, text: str) -> None:
    """Spend what it takes to change the case of a text: a letter may become three."""
    budget.spend(len(text) if text.isascii() else 12 * len(text))


def spend_search(budget: Budget, text: str, chars: Any = None, *args: Any) -> None:
    """Spend what it takes to look at each place of a text for all of another."""
    spend_read(budget, text, *args)
    if isinstance(chars, str):
        budget.spend(size(text) * (len(chars) >> 4))


def spend_replace(budget: Budget, text: str, old: Any, new: Any, count: Any = -1) -> None:
    """Spend what a text takes after a replacement."""
    spend_read(budget, text)
    if isinstance(old, str) and isinstance(new, str):
        places = text.count(old)
        if isinstance(count, int) and count >= 0:
            places = min(places, count)
        budget.spend(bytes_per_char(text, new) * (len(text) + places * len(new)))


def spend_join(budget: Budget, separator: str, items: Any) -> None:
    """Spend what texts and the separators between them take."""
    parts = budget.items(items)
    texts = [part for part in parts if isinstance(part, str)]
    for part in parts:
        if not isinstance(part, str):
            budget.weigh(part, 4 * ESCAPE_GROWTH)
    budget.spend(room(*texts, *[separator] * len(parts)))


def _spend_split(budget: Budget, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    spend_search(budget, text, sep)
    parts = text.count(sep) if isinstance(sep, str) and sep else (len(text) >> 1) + 1
    if isinstance(maxsplit, int) and maxsplit >= 0:
        parts = min(parts, maxsplit)
    budget.spend(ITEM * (parts + 1))


def _spend_lines(budget: Budget, text: str, keepends: Any = False) -> None:
    spend_read(budget, text, keepends)
    budget.spend(2 * ITEM * count_lines(text))


def _spend_width(budget: Budget, text: str, width: Any, fill: Any = " ") -> None:
    spend_read(budget, text, fill)
    budget.spend(4 * check_width(width))


def spend_format(budget: Budget, text: str, values: Any) -> None:
    """Spend what `text % values` takes."""
    if _STARRED.search(text):
        refuse("a format takes its width from elsewhere")
    _spend_fields(budget, text, text.count("%"), values)


def spend_fields(budget: Budget, text: str, values: Any) -> None:
    """Spend what `text.format(values)` takes."""
    num_fields = 0
    for _, _, spec, _ in Formatter().parse(text):
        num_fields += 1
        if spec and "{" in spec:
            refuse("a format takes its width from elsewhere")
    _spend_fields(budget, text, num_fields, values)


def _spend_fields(budget: Budget, text: str, num_fields: int, values: Any) -> None:
    spend_read(budget, text)
    digits = _DIGITS.findall(text)
    widest = max((len(each) for each in digits), default=0)
    if widest > 4:
        refuse("a format has a width of more than four digits")
    width = max(map(int, digits), default=0) + ITEM
    before = budget.left
    budget.weigh([values], 4 * (1 if type(text) is str else ESCAPE_GROWTH))
    budget.spend(num_fields * (4 * width + before - budget.left))


def _spend_get(budget: Budget, mapping: Mapping[Any, Any], key: Any, default: Any = None) -> None:
    del mapping, default
    check_key(key)
    budget.spend(0)


def _spend_nothing(budget: Budget, mapping: Mapping[Any, Any]) -> None:
    del mapping
    budget.spend(ITEM)


def _spend_comparisons(budget: Budget, values: Any, value: Any, *args: Any) -> None:
    del args
    budget.operand(values)
    budget.operand(value)


_READS = (
    "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier",
    "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "partition", "removeprefix",
    "removesuffix", "startswith",
)  # fmt: skip
_SEARCHES = ("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip")
_CASES = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
_OF_TEXT: dict[str, Cost] = {
    **dict.fromkeys(_READS, spend_read),
    **dict.fromkeys(_SEARCHES, spend_search),
    **dict.fromkeys(_CASES, spend_case),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _spend_width),
    **dict.fromkeys(("split", "rsplit"), _spend_split),
    "splitlines": _spend_lines,
    "join": spend_join,
    "replace": spend_replace,
}
_OF_LIST: dict[str, Cost] = dict.fromkeys(("count", "index"), _spend_comparisons)
_METHODS: dict[type, dict[str, Cost]] = {
    str: _OF_TEXT,
    Markup: _OF_TEXT,
    dict: {"get": _spend_get, **dict.fromkeys(("items", "keys", "values"), _spend_nothing)},
    list: _OF_LIST,
    tuple: _OF_LIST,
}


def find_cost(owner: Any, name: str) -> Cost:
    """Return what spends for a call of an object's method.

    Raises:
        TemplateRuntimeError: no template may call it.
    """
    cost = _METHODS.get(type(owner), {}).get(name)
    if cost is None:
        refuse(f"no template may call {type(owner).__name__}.{name}")
    return cost


def is_number(value: Any) -> bool:
    """Say whether a value is an integer or a decimal."""
    return type(value) in SCALARS and isinstance(value, (int, float))
