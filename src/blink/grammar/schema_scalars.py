# SPDX-License-Identifier: Apache-2.0
"""What the keywords of strings and numbers mean, as sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blink.grammar.format_languages import format_language
from blink.grammar.formats import FORMATS
from blink.grammar.numbers import Numbers, all_numbers, at_least, at_most, multiples
from blink.grammar.pattern import pattern_language
from blink.grammar.strings import ALL_STRINGS, Strings, strings_of, strings_of_lengths


def count_of(schema: Mapping[str, Any], name: str) -> int | None:
    """Return a keyword that counts something; None: it is not there."""
    return int(schema[name]) if name in schema else None


def strings_of_schema(schema: Mapping[str, Any], *, is_outer: bool = False) -> Strings:
    """Return the strings that a schema allows; is_outer: all that any validator might take."""
    found = ALL_STRINGS
    most = count_of(schema, "maxLength")
    if "format" in schema and schema["format"] in FORMATS:
        found = found & strings_of(format_language(schema["format"], most, is_outer=is_outer))
    if "pattern" in schema:
        found = found & strings_of(pattern_language(schema["pattern"], is_outer=is_outer))
    return found & strings_of_lengths(int(schema.get("minLength", 0)), most)


def numbers_of_schema(schema: Mapping[str, Any]) -> Numbers:
    """Return the numbers that a schema allows."""
    found = all_numbers()
    for closed, opened, beyond in (
        ("minimum", "exclusiveMinimum", at_least),
        ("maximum", "exclusiveMaximum", at_most),
    ):
        limit = schema.get(opened)
        if isinstance(limit, bool):  # of draft 4
            if closed in schema:
                found = found & beyond(schema[closed], is_open=limit)
            continue
        if closed in schema:
            found = found & beyond(schema[closed], is_open=False)
        if limit is not None:
            found = found & beyond(limit, is_open=True)
    return found & multiples(schema["multipleOf"]) if "multipleOf" in schema else found
