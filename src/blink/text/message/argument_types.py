# SPDX-License-Identifier: Apache-2.0
"""The JSON of an argument that a model wrote as text, by the types that the function's schema allows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from blink.grammar.members import READ_AS, READ_AS_FROM
from blink.grammar.schema_forms import KINDS

STRING = frozenset({"string"})
_SPACE = " \t\r\n"
_WORDS = {name: re.compile(pattern) for name, pattern in READ_AS.items()}
_INTEGER = re.compile(r"([+-]?)0*([0-9]+?)(?:\.0*)?")
_MAX_REFERENCES = 8
_ANY: frozenset[str] = frozenset()


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types of an argument by the schema of all; empty: it may be anything."""
    inside, depth = parameters, _MAX_REFERENCES
    while isinstance(inside.get("$ref"), str) and depth:
        inside, depth = _resolve(inside["$ref"], parameters), depth - 1
    for part in (inside, *_mappings(inside.get("allOf"))):
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return _types(properties[name], parameters, _MAX_REFERENCES)
    return _types(inside.get("additionalProperties"), parameters, _MAX_REFERENCES)


def to_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: of one of the types, in doubt a string."""
    word = text.strip(_SPACE)
    if not types:
        return word if _is_json(word) else quote(text)
    kind = next((name for name, pattern in _WORDS.items() if name in types and pattern.fullmatch(word)), "string")
    if kind == "null":
        return "null"
    if kind == "boolean":
        return word.lower()
    if kind == "integer":
        return _INTEGER.sub(lambda found: ("-" if found[1] == "-" else "") + found[2], word)
    if kind == "number":
        return word
    may_be_json = any(name in types and word.startswith(first) for name, first in READ_AS_FROM.items())
    return word if may_be_json and _is_json(word) else quote(text)


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return _ANY
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_type_of, values))
    found = schema.get("type")
    if isinstance(found, str | list):
        return frozenset([found] if isinstance(found, str) else [each for each in found if isinstance(each, str)])
    for name in ("anyOf", "oneOf"):
        if options := _mappings(schema.get(name)):
            known = [_types(option, root, depth - 1) for option in options]
            return _ANY if _ANY in known else frozenset().union(*known)
    known = [found for part in _mappings(schema.get("allOf")) if (found := _types(part, root, depth - 1))]
    return known[0] if known else frozenset(kind for kind, names in KINDS.items() if names & schema.keys())


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) and reference.startswith("#") else {}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = ((str, "string"), (int, "integer"), (float, "number"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
