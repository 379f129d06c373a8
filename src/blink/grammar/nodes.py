# SPDX-License-Identifier: Apache-2.0
"""Schemas as terms of logic: what is to be held together, or is not to hold, before anything of it is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


class Node:
    """A schema, or a conjunction or negation of some. Made by the functions below: equal ones are one object."""

    __slots__ = ("__weakref__", "key", "schema")

    def __init__(self, key: tuple[Any, ...], schema: Any = None) -> None:
        self.key = key
        self.schema = schema

    def __and__(self, other: Node) -> Node:
        if other is ANYTHING or self is NOTHING or self is other:
            return self
        if self is ANYTHING or other is NOTHING:
            return other
        return _both({**dict.fromkeys(_parts(self)), **dict.fromkeys(_parts(other))})

    def __invert__(self) -> Node:
        if self is ANYTHING:
            return NOTHING
        if self is NOTHING:
            return ANYTHING
        return self.key[1] if self.key[0] == "not" else Node(("not", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


ANYTHING, NOTHING = Node(("anything",)), Node(("nothing",))


def _parts(node: Node) -> tuple[Node, ...]:
    return node.key[1] if node.key[0] == "and" else (node,)


def _both(parts: Iterable[Node]) -> Node:
    known = tuple(parts)
    if any(~part in known for part in known):
        return NOTHING
    return known[0] if len(known) == 1 else Node(("and", known))


def schema_node(schema: Any, key: object) -> Node:
    """Return the node of a part of a schema; parts with equal keys mean the same."""
    if isinstance(schema, bool):
        return ANYTHING if schema else NOTHING
    return Node(("raw", key), schema) if schema else ANYTHING


def value_node(value: Any) -> Node:
    """Return the node of one value."""
    return Node(("raw", ("value", json.dumps(value))), {"const": value})
