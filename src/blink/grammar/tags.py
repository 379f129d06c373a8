# SPDX-License-Identifier: Apache-2.0
"""Texts with tagged JSON inside, as expressions."""

from __future__ import annotations

from collections.abc import Callable

from blink.grammar.errors import GrammarError
from blink.grammar.expression import Expression, Repeat, Text, Until, choice, series
from blink.grammar.literal import inner_places, literal
from blink.structured_outputs import StructuralTag, StructuredOutputsParams


def compile_tags(tag: StructuralTag, compile_schema: Callable[..., Expression]) -> Expression:
    """Return the texts that a structural tag describes.

    compile_schema: takes a schema, and how an object's members are written.


    Raises:
        GrammarError: a tag cannot be compiled.
    """
    if tag.trigger:
        # What begins each tag has been read when its rest is called.
        rests = [
            series(
                literal(each.begin[len(tag.trigger) :]),
                compile_schema(each.schema, each.parameters),
                literal(each.end),
            )
            for each in tag.tags
        ]
        if tag.max_tags not in (None, 1):
            raise GrammarError("max_tags with a trigger may be 1 only")
        is_once = tag.max_tags == 1
        return Until(tag.trigger.encode(), choice(rests), is_once=is_once, places=inner_places(tag.trigger))
    tags = choice(
        [
            series(literal(each.begin), compile_schema(each.schema, each.parameters), literal(each.end))
            for each in tag.tags
        ]
    )
    most = None if tag.max_tags is None else tag.max_tags - 1
    rest = Repeat(series(literal(tag.separator), tags), 0, most)
    return series(literal(tag.prefix), tags, rest, literal(tag.suffix))


def place_behind_reasoning(params: StructuredOutputsParams, form: Expression) -> Expression:
    """Return the form with the reasoning before it that a request allows."""
    if not params.reasoning_end:
        return form
    behind = Until(params.reasoning_end.encode(), series(Repeat(Text(b"\n"), 0, 2), form), is_once=True)
    return choice([series(literal(params.reasoning_start), behind), form]) if params.reasoning_start else behind
