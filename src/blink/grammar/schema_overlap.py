# SPDX-License-Identifier: Apache-2.0
"""Whether a value of one schema of a oneOf could be one of another too: then exactly one cannot be promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.schema_merge import Schema, constraints, types_of

_MAX_DEPTH = 6
_MAX_OPTIONS = 100


def check_one_of(options: Sequence[Schema], resolve: Callable[[Any], Schema]) -> None:
    """Refuse options of which two may allow one value.

    Raises:
        GrammarError: they may.
    """
    if len(options) > _MAX_OPTIONS:
        raise GrammarTooLargeError(f"a oneOf may have {_MAX_OPTIONS} options; use anyOf")
    for one, other in combinations(options, 2):
        if not _are_apart(one, other, resolve, 0):
            raise GrammarError("options of a oneOf may allow the same value; tell them apart by a const, or use anyOf")


def _are_apart(one: Schema, other: Schema, resolve: Callable[[Any], Schema], depth: int) -> bool:
    if one is False or other is False:
        return True
    if one is True or other is True or depth > _MAX_DEPTH:
        return False
    assert isinstance(one, Mapping) and isinstance(other, Mapping)
    for schema, beside in ((one, other), (other, one)):
        if "$ref" in schema:
            return _are_apart(resolve(schema["$ref"]), beside, resolve, depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return all(_are_apart(option, beside, resolve, depth + 1) for option in schema[name])
        if "allOf" in schema:
            return any(_are_apart(part, beside, resolve, depth + 1) for part in schema["allOf"])
    one, other = constraints(one), constraints(other)
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(_is_same(value, known) for value in values for known in others)
    kinds = [_kinds(schema) for schema in (one, other)]
    if kinds[0] is not None and kinds[1] is not None and not kinds[0] & kinds[1]:
        return True
    if "object" in (kinds[0] or ()) and kinds[0] == kinds[1]:
        return _are_objects_apart(one, other, resolve, depth)
    return False


def _are_objects_apart(
    one: Mapping[str, Any], other: Mapping[str, Any], resolve: Callable[[Any], Schema], depth: int
) -> bool:
    known, beside = one.get("properties", {}), other.get("properties", {})
    required, needed = set(one.get("required", [])), set(other.get("required", []))
    for name in required & needed:
        if _are_apart(known.get(name, True), beside.get(name, True), resolve, depth + 1):
            return True
    return _refuses(one, other) and _refuses(other, one)


def _refuses(schema: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether a schema refuses all objects that are generated for another: with the members that it declares."""
    declared = other.get("properties", {}).keys() | set(other.get("required", []))
    is_missing = bool(declared) and bool(set(schema.get("required", [])) - declared)
    is_closed = schema.get("additionalProperties") is False
    return is_missing or (is_closed and bool(set(other.get("required", [])) - schema.get("properties", {}).keys()))


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """Return types, as number includes integer."""
    values = _values(schema)
    if values is not None:
        names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
        return {names.get(type(value), "null") for value in values}
    kinds = types_of(schema)
    return None if kinds is None else {"number" if kind == "integer" else kind for kind in kinds}


def _is_same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
