# SPDX-License-Identifier: Apache-2.0
"""Whether the keywords of a JSON schema have values that they can have: looked at before anything else is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blink.grammar.errors import GrammarError
from blink.grammar.forms import TYPES

MAX_DEPTH = 64
_SCHEMA = ("additionalProperties", "unevaluatedProperties", "propertyNames", "additionalItems", "unevaluatedItems",
           "contains", "not", "if", "then", "else")  # fmt: skip
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
           "maxContains")  # fmt: skip
_NUMBERS = ("minimum", "maximum", "multipleOf")
_TEXTS = ("pattern", "format", "$ref", "$id", "$schema", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef")
MAP_KEYWORDS = frozenset((*_SCHEMA_MAPS, "dependencies"))
SCHEMA_KEYWORDS = frozenset((*_SCHEMA, *_SCHEMA_LISTS, *MAP_KEYWORDS, "items"))
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "example", "deprecated", "readOnly",
                         "writeOnly", "$comment"))  # fmt: skip
# Programs write null for a list or a map that they do not have.
_MAY_BE_NULL = {"required", "properties", "patternProperties", "$defs", "definitions", "dependentRequired", "items"}


def check_schema(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Check a schema with all schemas inside, yielding each that is an object; keywords that are null are removed.

    Raises:
        GrammarError: a keyword has a value that it cannot have.
    """
    left: list[tuple[Any, str, int]] = [(schema, "", 0)]
    while left:
        part, where, depth = left.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise GrammarError(f"a schema is an object or a boolean, got {type(part).__name__} at {where or '/'}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"it is nested more than {MAX_DEPTH} levels deep at {where[:80]}")
        for name in [name for name in _MAY_BE_NULL & part.keys() if part[name] is None]:
            del part[name]
        for name, value in part.items():
            check = _CHECKS.get(name)
            if check is not None:
                try:
                    check(value)
                except GrammarError as error:
                    raise GrammarError(f"{name!r} {error.message} at {where or '/'}") from None
        yield part
        left += [(inside, f"{where}/{place}"[:200], depth + 1) for place, inside in schemas_inside(part)]


def schemas_inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the schemas of which a schema is made, and where they stand."""
    for name in _SCHEMA:
        if name in schema:
            yield name, schema[name]
    for name in (*_SCHEMA_LISTS, "items"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{index}", each) for index, each in enumerate(schema[name]))
        elif name == "items" and name in schema:
            yield name, schema[name]
    for name in (*_SCHEMA_MAPS, "dependencies"):
        for key, value in schema.get(name, {}).items():
            if not (name == "dependencies" and isinstance(value, list)):
                yield f"{name}/{key}", value


def check_value(value: Any) -> None:
    """Check that a value can be written as JSON.

    Raises:
        GrammarError: it holds half a surrogate pair, or a number that is not finite.
    """
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            _check_text(part)
        elif isinstance(part, float) and not math.isfinite(part):
            raise GrammarError("has a number that is not finite")
        elif isinstance(part, Mapping):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list):
            left += part


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise GrammarError(f"must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise GrammarError("holds half a surrogate pair") from None


def _check_texts(value: Any) -> None:
    if not isinstance(value, list):
        raise GrammarError(f"must be a list of names, got {type(value).__name__}")
    for each in value:
        _check_text(each)


def _check_types(value: Any) -> None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise GrammarError("must be a type or a list of types")
    for name in names:
        if name not in TYPES:
            raise GrammarError(f"is not a type of JSON Schema: {str(name)[:40]!r} is no type")


def _check_list(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise GrammarError("must be a list that is not empty")


def _check_enum(value: Any) -> None:
    _check_list(value)
    check_value(value)


def _check_map(value: Any) -> None:
    if not isinstance(value, dict):
        raise GrammarError(f"must be an object, got {type(value).__name__}")
    for name in value:
        _check_text(name)


def _check_needs(value: Any) -> None:
    _check_map(value)
    for each in value.values():
        _check_texts(each)


def _check_dependencies(value: Any) -> None:
    _check_map(value)
    for each in value.values():
        if isinstance(each, list):
            _check_texts(each)


def _check_count(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value) or value < 0:
        raise GrammarError(f"must be a count, got {str(value)[:40]}")


def _check_number(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GrammarError(f"must be a number, got {str(value)[:40]}")


def _check_exclusive(value: Any) -> None:
    if not isinstance(value, bool):  # as in draft 4
        _check_number(value)


def _check_flag(value: Any) -> None:
    if not isinstance(value, bool):
        raise GrammarError(f"must be true or false, got {type(value).__name__}")


_CHECKS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(_SCHEMA_LISTS, _check_list),
    **dict.fromkeys((*_SCHEMA_MAPS,), _check_map),
    **dict.fromkeys(_COUNTS, _check_count),
    **dict.fromkeys(_NUMBERS, _check_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _check_exclusive),
    **dict.fromkeys(_TEXTS, _check_text),
    "type": _check_types,
    "enum": _check_enum,
    "const": check_value,
    "required": _check_texts,
    "dependentRequired": _check_needs,
    "dependencies": _check_dependencies,
    "uniqueItems": _check_flag,
}
