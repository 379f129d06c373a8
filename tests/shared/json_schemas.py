# SPDX-License-Identifier: Apache-2.0
"""JSON schemas to compile: a public suite's, and ones as programs write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

_SUITE = Path(__file__).with_name("json_schema_suite.jsonl")
_PROGRAMS = Path(__file__).with_name("schemas_of_programs.jsonl")


@dataclass(frozen=True)
class Case:
    """A schema of the suite, and values that it allows or not."""

    file: str
    description: str
    schema: Any
    tests: list[tuple[Any, bool]]


@dataclass(frozen=True)
class Program:
    """A schema as a program writes it, and values that it allows and forbids."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def read_suite() -> list[Case]:
    return [Case(**json.loads(line)) for line in _SUITE.read_text().splitlines()]


def read_programs() -> list[Program]:
    return [Program(**json.loads(line)) for line in _PROGRAMS.read_text().splitlines()]


def exact_number(text: str) -> int | Decimal:
    """Return what a number is: of floats, 0.407 is no multiple of 0.0001."""
    value = Decimal(text)
    return int(value) if abs(value) < 10**30 and value == int(value) else value


def exactly(value: Any) -> Any:
    """Return a schema or a value with exact numbers."""
    return json.loads(json.dumps(value), parse_float=exact_number)


_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_LIST = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
}
_EXPRESSION = {
    "$ref": "#/$defs/expression",
    "$defs": {
        "expression": {"anyOf": [{"$ref": "#/$defs/binary"}, {"$ref": "#/$defs/leaf"}]},
        "binary": {
            "type": "object",
            "properties": {
                "op": {"enum": ["+", "-"]},
                "left": {"$ref": "#/$defs/expression"},
                "right": {"$ref": "#/$defs/expression"},
            },
            "required": ["op", "left", "right"],
        },
        "leaf": {"type": "object", "properties": {"value": {"type": "number"}}, "required": ["value"]},
    },
}
_TAGGED = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["kind", "radius"],
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "square"}, "side": {"type": "number", "minimum": 0.5, "maximum": 9.25}},
            "required": ["kind", "side"],
        },
    ]
}
# As programs write them: pydantic's output, tools' parameters, OpenAPI's components.
PROGRAMS: dict[str, Any] = {
    "person": _PERSON,
    "people": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
    "linked list": {"$ref": "#/$defs/list", "$defs": {"list": _LIST}},
    "expression": _EXPRESSION,
    "tagged union": _TAGGED,
    "any object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "integer"}],
        "items": {"type": "boolean"},
        "minItems": 1,
        "maxItems": 4,
    },
    "long text": {"type": "string", "minLength": 150, "maxLength": 260},
    "nested": {
        "type": "object",
        "properties": {
            "user": {"$ref": "#/definitions/user"},
            "friends": {"type": "array", "items": {"$ref": "#/definitions/user"}, "maxItems": 2},
            "when": {"type": "string", "format": "date-time"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["user", "when"],
        "definitions": {
            "user": {
                "type": "object",
                "properties": {"id": {"type": "integer", "multipleOf": 5}, "ok": {"type": ["boolean", "null"]}},
                "required": ["id"],
            }
        },
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]},
            {"properties": {"b": {"type": "integer", "minimum": -13, "exclusiveMaximum": 2987}}, "required": ["b"]},
        ]
    },
    "patterns": {
        "type": "object",
        "properties": {
            "phone": {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
            "code": {"type": "string", "pattern": "^[A-Z]+$", "minLength": 2, "maxLength": 4},
            "path": {"type": "string", "pattern": "^/[^/\\s]{1,8}$"},
        },
        "required": ["phone", "code", "path"],
    },
    "values": {"enum": ["a", 1, None, True, {"x": [1, 2]}, 'quoted "text"\n']},
}
