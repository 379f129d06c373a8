# SPDX-License-Identifier: Apache-2.0
"""The formats of strings as languages."""

from __future__ import annotations

from functools import lru_cache, reduce

from blink.grammar.formats import FORMATS
from blink.grammar.language import Language
from blink.grammar.pattern import pattern_language


@lru_cache(maxsize=64)
def format_language(name: str, most: int | None = None, *, is_outer: bool = False) -> Language:
    """Return the texts of a format; of texts longer than `most` characters some may be missing.

    is_outer: all texts that some validator takes, not those that are surely valid.
    """
    form = FORMATS[name]
    if is_outer:
        return pattern_language(form.outer, searches=False) if form.outer else _matching(form.patterns, form.excluded)
    found = _matching(form.patterns, form.excluded)
    if most is not None and form.plain is not None:
        longest = found.lengths[1]
        if longest is None or longest > most:
            return _matching(form.plain(most), form.excluded)
    return found


@lru_cache(maxsize=64)
def _matching(patterns: tuple[str, ...], excluded: tuple[str, ...]) -> Language:
    found = reduce(Language.__and__, (pattern_language(each, searches=False) for each in patterns))
    return reduce(Language.__sub__, (pattern_language(each, searches=False) for each in excluded), found)
