# SPDX-License-Identifier: Apache-2.0
"""Unicode's general categories and some scripts as classes of characters."""

from __future__ import annotations

import sys
import unicodedata
from functools import lru_cache

from blink.grammar.errors import GrammarError
from blink.grammar.expression import CodePoints, union

_NAMES = {
    "letter": "L", "lowercase_letter": "Ll", "uppercase_letter": "Lu", "mark": "M", "number": "N",
    "decimal_number": "Nd", "digit": "Nd", "punctuation": "P", "punct": "P", "symbol": "S", "separator": "Z",
    "space_separator": "Zs", "other": "C", "control": "Cc",
}  # fmt: skip
_ALL = ("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
        "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn")  # fmt: skip


def category(name: str) -> CodePoints:
    """Return the characters of a general category, such as L, Lu or Letter.

    Raises:
        GrammarError: it is none; scripts and other properties are not supported.
    """
    short = name.partition("=")[2] if name.partition("=")[0] in ("gc", "General_Category") else name
    short = _NAMES.get(short.lower(), short)
    members = [each for each in _ALL if each.startswith(short)]
    if not members or not 1 <= len(short) <= 2:
        raise GrammarError(f"\\p{{{name[:40]}}} is not supported: only general categories are, such as L or Nd")
    return union(code_range for each in members for code_range in _categories().get(each, ()))


@lru_cache(maxsize=1)
def _categories() -> dict[str, tuple[tuple[int, int], ...]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for code in range(sys.maxunicode + 1):
        ranges = found.setdefault(unicodedata.category(chr(code)), [])
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return {name: tuple(ranges) for name, ranges in found.items()}
