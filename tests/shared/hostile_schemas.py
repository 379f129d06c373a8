# SPDX-License-Identifier: Apache-2.0
"""Schemas of much work for their size: each once held up a frontend, or held its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def _doubling(levels: int = 21) -> Any:
    """2^levels merges: each level refers to the one below twice, and an allOf puts two such trees together."""
    forms: dict[str, Any] = {"d0": {"type": "object", "properties": {"leaf": {"type": "integer"}}}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        forms[f"d{level}"] = {"type": "object", "properties": {"left": below, "right": below}}
    top = {"$ref": f"#/$defs/d{levels}"}
    return {"$defs": forms, "allOf": [top, {**top, "maxProperties": 9}]}


def _many(count: int, make: Callable[[int], Any]) -> list[Any]:
    return [make(index) for index in range(count)]


# Each takes a number that makes it another schema of its kind.
SCHEMAS: dict[str, Callable[[int], Any]] = {
    "a pattern that backtracks, on a name": lambda n: {
        "type": "object",
        "properties": {"b" * (29 + n) + "?": {"type": "boolean"}},
        "patternProperties": {"^(b|bb)*$": {}},
    },
    "a pattern that backtracks, on all names": lambda n: {
        "type": "object",
        "properties": {"c" * (30 + n) + ";": {}},
        "propertyNames": {"pattern": "^([a-c]+)*$"},
    },
    "references that double": lambda n: {"title": str(n), **_doubling()},
    "texts of options, each with each": lambda n: {
        "oneOf": _many(100, lambda i: {"enum": _many(170, lambda j: f"{n} {i} {j}")})
    },
    "integers of options, each with each": lambda n: {
        "oneOf": _many(100, lambda i: {"enum": _many(380, lambda j: n + 1000 * i + j)})
    },
    "long lists without a common value": lambda n: {
        "allOf": [{"enum": _many(19_000, lambda i: i + n)}, {"enum": _many(19_000, lambda i: i + n + 20_000)}]
    },
    "names and patterns": lambda n: {
        "type": "object",
        "properties": {f"{'name' * 50}{n}{i}": {} for i in range(180)},
        "patternProperties": {f"^(na?me?)*{n}{i}x$": {} for i in range(190)},
    },
    "bounds of many digits": lambda n: {
        "type": "object",
        "properties": {
            f"v{n}{i}": {"type": "number", "minimum": -2.345678e-30, "maximum": 2.3456e40} for i in range(290)
        },
    },
    "options of numbers": lambda n: {
        "anyOf": _many(3500, lambda i: {"type": "number", "minimum": n + i / 7, "maximum": 10**30 + i})
    },
    "options of multiples": lambda n: {
        "anyOf": _many(2800, lambda i: {"type": "integer", "multipleOf": 1, "minimum": n + i, "maximum": n + i + 997})
    },
    "names that are required and not there": lambda n: {
        "type": "object",
        "properties": {f"p{n}{i}": {} for i in range(11_500)},
        "required": _many(11_500, lambda i: f"r{n}{i}"),
    },
}


def hostile_body(name: str, number: int) -> bytes:
    """Return a completion's body with a schema of this kind."""
    form = {"json": SCHEMAS[name](number)}
    return json.dumps({"prompt": "a", "max_tokens": 1, "structured_outputs": form}, separators=(",", ":")).encode()
