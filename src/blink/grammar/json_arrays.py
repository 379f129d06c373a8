# SPDX-License-Identifier: Apache-2.0
"""Arrays whose items have to be counted by their kind, or have to differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.expression import Expression, Paths
from blink.grammar.nodes import NOTHING, Node
from blink.grammar.shapes import ArrayShape

_MAX_ANY_ORDER = 7  # values that may come in any order: each set of them is a state
_MAX_COUNTS = 4000


def write_distinct(shape: ArrayShape, values: Sequence[Expression], comma: Expression) -> Expression:
    """Return arrays of different ones of some values: in any order if they are few, else in their order."""
    least, most = shape.least, min(len(values), len(values) if shape.most is None else shape.most)
    edges: list[tuple[int, Expression, int]] = []
    if len(values) <= _MAX_ANY_ORDER:
        for used in range(1 << len(values)):
            if used.bit_count() < most:
                edges += [
                    (used, value, used | 1 << index) for index, value in enumerate(values) if not used & 1 << index
                ]
        ends = [used for used in range(1 << len(values)) if least <= used.bit_count() <= most]
        return Paths(tuple(edges), frozenset(ends), comma)
    is_counted = least > 1 or most < len(values)
    counts = range(most + 1) if is_counted else range(2)
    if len(values) * len(counts) > _MAX_COUNTS:
        raise GrammarTooLargeError("uniqueItems has too many values to count")
    # A state is how many values have been passed by, and how many of them were written.
    width = len(counts)
    for index, value in enumerate(values):
        for count in counts:
            more = min(count + 1, width - 1)
            if more == count and is_counted:
                continue
            for after in range(index + 1):
                if after == 0 and count == 0:
                    edges.append((0, value, (index + 1) * width + more))
                elif after > 0 and count > 0:
                    edges.append((after * width + count, value, (index + 1) * width + more))
    ends = [after * width + count for after in range(1, len(values) + 1) for count in counts if count >= max(least, 1)]
    return Paths(tuple(edges), frozenset([*ends, *([0] if least == 0 else [])]), comma)


def write_counted(shape: ArrayShape, value: Callable[[Node], Expression], comma: Expression) -> Expression:
    """Return arrays of which a number of items are of a kind."""
    if len(shape.contained) > 1:
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
    return Paths(tuple(edges), frozenset(ends), comma)
