# SPDX-License-Identifier: Apache-2.0
"""Arrays whose items have to be counted by their kind, or have to differ."""

from __future__ import annotations

from collections.abc import Callable

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.expression import EMPTY, NEVER, Expression, Mark, Marked, Paths, Repeat, optional, series
from blink.grammar.json_text import Layout
from blink.grammar.nodes import NOTHING, Node
from blink.grammar.shapes import ArrayShape
from blink.region.layout import CONSTANTS

_MAX_COUNTS = 4000
MAX_UNIQUE = CONSTANTS["max_unique_items"]


def write_unique(shape: ArrayShape, value: Expression, count: int, layout: Layout) -> Expression:
    """Return arrays of different values, of which there are `count` or, if that is above MAX_UNIQUE, many."""
    if shape.least > count:
        return NEVER
    if shape.least > MAX_UNIQUE:
        raise GrammarTooLargeError(f"arrays with uniqueItems may have {MAX_UNIQUE} items")
    most = shape.most if count > MAX_UNIQUE else count if shape.most is None else min(shape.most, count)
    if most == 0:
        return EMPTY
    comma = layout.limiting_comma if most is None or most > MAX_UNIQUE else layout.comma
    others = Repeat(
        series(comma, Marked(value, Mark.ITEM)), max(shape.least - 1, 0), None if most is None else most - 1
    )
    filled = series(Marked(value, Mark.FIRST_ITEM), others, layout.space)
    return filled if shape.least > 0 else optional(filled)


def write_counted(shape: ArrayShape, value: Callable[[Node], Expression], layout: Layout) -> Expression:
    """Return arrays of which a number of items are of a kind."""
    if len(shape.contained) != 1:
        raise GrammarError("several 'contains' that must hold together are not supported")
    [contained] = shape.contained
    node, limit = contained.node, contained.least if contained.most is None else contained.most
    length = max(len(shape.prefix), shape.least, shape.most or 0)
    if (length + 1) * (limit + 1) > _MAX_COUNTS:
        raise GrammarTooLargeError("'contains' has too much to count")
    width = limit + 1
    edges: list[tuple[int, Expression, int]] = []
    for at in range(length + 1):
        after = min(at + 1, length)
        if after == at and shape.most is not None:
            break
        item = shape.item(at)
        for count in range(width):
            here, there = at * width + count, after * width
            if count == limit and contained.most is None:
                edges.append((here, value(item), there + count))
                continue
            others, such = item & ~node, item & node
            if others is not NOTHING:
                edges.append((here, value(others), there + count))
            if such is not NOTHING and count < limit:
                edges.append((here, value(such), there + count + 1))
    ends = [
        at * width + count
        for at in range(length + 1)
        for count in range(width)
        if count >= contained.least and at >= shape.least
    ]
    return Paths(tuple(edges), frozenset(ends), layout.comma, layout.space)
