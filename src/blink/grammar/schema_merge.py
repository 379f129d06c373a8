# SPDX-License-Identifier: Apache-2.0
"""The conjunction of two JSON schemas as one schema, as far as that can be written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blink.grammar.errors import GrammarError

Schema = Mapping[str, Any] | bool
_MAX_DEPTH = 24
_ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default",
        "examples", "example", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
        "contentSchema", "nullable", "$vocabulary", "strict",
    )
)  # fmt: skip
_APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}
_UNEVALUATED = {
    "unevaluatedProperties": {"properties", "additionalProperties", "patternProperties", "unevaluatedProperties"}
    | _APPLICATORS,
    "unevaluatedItems": {"items", "prefixItems", "additionalItems", "unevaluatedItems"} | _APPLICATORS,
}
_TIGHTER: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), min),
}


def is_annotation(keyword: str) -> bool:
    """Say whether a keyword of JSON Schema allows and forbids nothing."""
    return keyword in _ANNOTATIONS


def constraints(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without its annotations."""
    return {name: value for name, value in schema.items() if name not in _ANNOTATIONS}


def types_of(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the types that a schema names; None: it names none."""
    found = schema.get("type")
    return None if found is None else [found] if isinstance(found, str) else list(found)


def merge(one: Schema, other: Schema, resolve: Callable[[str], Schema], depth: int = 0) -> Schema:
    """Return a schema of what both allow; resolve: finds what a $ref means.

    Raises:
        GrammarError: it cannot be written as one.
    """
    if depth > _MAX_DEPTH:
        raise GrammarError("schemas that must hold together are nested too deeply")
    if isinstance(one, bool) or isinstance(other, bool):
        return other if one is True else one if other is True else False
    one, other = (_without_ref(constraints(schema), resolve, depth) for schema in (one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return merge(one, other, resolve, depth + 1)
    _check_scopes(one, other)
    _check_scopes(other, one)
    merged = dict(one)
    _merge_members(merged, one, other, lambda a, b: merge(a, b, resolve, depth + 1))
    for name, value in other.items():
        if name in ("properties", "additionalProperties"):
            continue
        merged[name] = _merge_keyword(name, merged[name], value, resolve, depth) if name in merged else value
    return merged


def merge_inside(outer: dict[str, Any], parts: Sequence[Schema], resolve: Callable[[str], Schema]) -> Schema:
    """Return a schema of what another allows and all parts of it do, into which its unevaluated members look."""
    unevaluated = {name: outer.pop(name) for name in _UNEVALUATED if name in outer}
    merged: Schema = outer
    for part in parts:
        merged = merge(merged, part, resolve)
    if isinstance(merged, bool):
        return {**unevaluated} if merged else False
    return {**unevaluated, **merged} if unevaluated else merged


def _check_scopes(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse keywords that speak of what their own schema does not list, beside another that lists more."""
    for name, listing in _UNEVALUATED.items():
        if one.get(name, True) is not True and other.keys() & listing:
            raise GrammarError(f"{name!r} beside a schema that must hold with it")
    if "prefixItems" in one and other.keys() & {"items", "prefixItems"}:
        raise GrammarError("'prefixItems' beside other items that must hold with them")


def _without_ref(schema: dict[str, Any], resolve: Callable[[str], Schema], depth: int) -> Schema:
    if "$ref" not in schema:
        return schema
    target = resolve(schema.pop("$ref"))
    return merge(target, schema, resolve, depth + 1) if schema or isinstance(target, bool) else target


def _merge_keyword(name: str, one: Any, other: Any, resolve: Callable[[str], Schema], depth: int) -> Any:
    if one == other and type(one) is type(other):
        return one
    if name in _TIGHTER:
        return _TIGHTER[name](one, other)
    if name == "type":
        names, others = (types_of({"type": value}) or [] for value in (one, other))
        both = [kind for kind in names if kind in others or (kind == "integer" and "number" in others)]
        return both + [kind for kind in others if kind == "integer" and "number" in names and kind not in both]
    if name == "required":
        return [*one, *(key for key in other if key not in one)]
    if name == "enum":
        return [value for value in one if any(value == known and type(value) is type(known) for known in other)]
    if name == "allOf":
        return [*one, *other]
    if name in ("anyOf", "oneOf") and len(one) * len(other) <= 64:
        return [merge(a, b, resolve, depth + 1) for a in one for b in other]
    if name in ("items", "propertyNames") and not isinstance(one, list) and not isinstance(other, list):
        return merge(one, other, resolve, depth + 1)
    if name in ("exclusiveMinimum", "exclusiveMaximum") and not isinstance(one, bool) and not isinstance(other, bool):
        return max(one, other) if name == "exclusiveMinimum" else min(one, other)
    if name == "uniqueItems":
        return True
    raise GrammarError(f"two different {name!r} must hold together")


def _merge_members(
    merged: dict[str, Any], one: Mapping[str, Any], other: Mapping[str, Any], both: Callable[[Schema, Schema], Schema]
) -> None:
    """Merge what the members of an object may be; a name that one schema does not list is an additional one there."""
    known = [schema.get("properties", {}) for schema in (one, other)]
    more = [schema.get("additionalProperties", True) for schema in (one, other)]
    if any("patternProperties" in schema for schema in (one, other)) and (known[0] or known[1]):
        raise GrammarError("patternProperties must hold together with other schemas")
    names = dict.fromkeys([*known[0], *known[1]])
    if names:
        merged["properties"] = {name: both(known[0].get(name, more[0]), known[1].get(name, more[1])) for name in names}
    if more != [True, True]:
        merged["additionalProperties"] = both(more[0], more[1])
