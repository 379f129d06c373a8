# SPDX-License-Identifier: Apache-2.0
"""The objects and arrays that a JSON schema allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from blink.grammar.errors import GrammarError
from blink.grammar.expression import NEVER, Choice, Expression, Members, optional, series
from blink.grammar.json_text import STRING, Layout, inside_string
from blink.grammar.regex import parse_regex
from blink.grammar.schema_merge import Schema, merge, types_of
from blink.grammar.schema_scalars import compile_string, count_bounds

_MAX_ITEMS = 4096  # of arrays whose length has bounds


class Compiler(Protocol):
    """What compiles the schemas inside."""

    @property
    def layout(self) -> Layout: ...

    def compile(self, schema: Any) -> Expression:
        """Return the values of a schema."""
        ...

    def resolve(self, reference: Any) -> Schema:
        """Return what a $ref means."""
        ...


def compile_object(compiler: Compiler, schema: Mapping[str, Any]) -> Expression:
    """Return the objects that a schema allows: with the members that it declares or, if none, any that it permits."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise GrammarError("'properties' must be an object and 'required' a list")
    least, most = count_bounds(schema, "minProperties", "maxProperties")
    more = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    declared = {**properties, **{name: more for name in required if name not in properties}}
    if not declared:
        return _compile_map(compiler, schema, more, least, most)
    names = schema.get("propertyNames", True)
    items: list[tuple[Expression, bool]] = []
    num_required = 0
    for name, value in declared.items():
        is_required = name in required
        value = _with_patterns(compiler, schema, name, value)
        expression = compiler.compile(value) if _may_be_named(names, name) else NEVER
        if is_never(expression):
            if is_required:
                return NEVER
            continue
        items.append((series(compiler.layout.literal(name), compiler.layout.colon, expression), is_required))
        num_required += is_required
    if most is not None and len(items) > most:
        if num_required > most:
            return NEVER
        if num_required < most:
            raise GrammarError("maxProperties below the number of properties is not supported")
        items = [item for item in items if item[1]]
    if least > max(num_required, 1) and least > len(items):
        return NEVER
    if least > max(num_required, 1):
        # As many of the others as are missing, the first of them.
        missing = least - num_required
        for place, (item, is_required) in enumerate(items):
            if not is_required and missing:
                items[place] = (item, True)
                missing -= 1
    return series("{", Members(tuple(items), compiler.layout.comma, may_be_empty=least == 0), "}")


def is_never(expression: Expression) -> bool:
    """Say whether an expression is plainly that of no text."""
    return isinstance(expression, Choice) and all(is_never(option) for option in expression.options)


def _with_patterns(compiler: Compiler, schema: Mapping[str, Any], name: str, value: Schema) -> Schema:
    for pattern, more in schema.get("patternProperties", {}).items():
        try:
            found = re.search(pattern, name)
        except re.error as error:
            raise GrammarError(f"pattern {pattern[:80]!r}: {error}") from None
        if found:
            value = merge(value, more, compiler.resolve)
    return value


def _may_be_named(names: Any, name: str) -> bool:
    if isinstance(names, bool):
        return names
    if isinstance(names, Mapping) and set(names) <= {"pattern", "minLength", "maxLength", "type"}:
        least, most = count_bounds(names, "minLength", "maxLength")
        fits = re.search(names.get("pattern", ""), name) is not None
        return fits and len(name) >= least and (most is None or len(name) <= most)
    if isinstance(names, Mapping) and set(names) == {"enum"}:
        return name in names["enum"]
    raise GrammarError("propertyNames beside properties may have a pattern, lengths or an enum only")


def _compile_map(
    compiler: Compiler, schema: Mapping[str, Any], more: Schema, least: int, most: int | None
) -> Expression:
    """Return objects of any members: all of one kind, since two may have one name, of which readers keep one."""
    if least > 1:
        raise GrammarError("minProperties above 1 needs declared properties, as names may repeat")
    key, value = STRING, more
    names = schema.get("propertyNames", True)
    patterns = schema.get("patternProperties", {})
    if patterns:
        if len(patterns) > 1 or not isinstance(names, bool):
            raise GrammarError("only one of patternProperties is supported, without propertyNames")
        pattern, value = next(iter(patterns.items()))
        key = series('"', inside_string(parse_regex(pattern, searches=True)), '"')
    elif isinstance(names, Mapping):
        key = _compile_names(compiler, names)
    elif names is False:
        value = False
    expression = compiler.compile(value)
    if is_never(expression) or is_never(key) or most == 0:
        return NEVER if least else series("{}")
    member = series(key, compiler.layout.colon, expression)
    return series("{", compiler.layout.list_of(member, least, most), "}")


def _compile_names(compiler: Compiler, names: Mapping[str, Any]) -> Expression:
    kinds = types_of(names)
    if kinds is not None and "string" not in kinds:
        return NEVER
    if names.keys() & {"enum", "const", "$ref", "anyOf", "oneOf", "allOf"}:
        return compiler.compile(merge(names, {"type": "string"}, compiler.resolve))
    return compile_string(names)


def compile_array(compiler: Compiler, schema: Mapping[str, Any]) -> Expression:
    """Return the arrays that a schema allows."""
    layout = compiler.layout
    least, most = count_bounds(schema, "minItems", "maxItems")
    if max(least, most or 0) > _MAX_ITEMS:
        raise GrammarError(f"arrays may have {_MAX_ITEMS} items if their number has bounds")
    prefix, rest = _items_of(schema)
    if schema.get("uniqueItems"):
        least, most, prefix, rest = _unique(least, most, prefix, rest)
    if most is not None and least > most:
        return NEVER
    first = [compiler.compile(item) for item in (prefix if most is None else prefix[:most])]
    never = next((place for place, item in enumerate(first) if is_never(item)), None)
    if never is not None:
        first, rest = first[:never], False
    num_more = None if most is None else most - len(first)
    others = compiler.compile(rest) if num_more != 0 else NEVER
    if is_never(others):
        num_more = 0
    if num_more == 0 and least > len(first):
        return NEVER
    if not first:
        return series("[", layout.list_of(others, least, num_more), "]")
    num_least = max(least - len(first), 0)
    tail = series() if num_more == 0 else series(layout.comma, layout.list_of(others, max(num_least, 1), num_more))
    if num_more != 0 and num_least == 0:
        tail = optional(tail)
    for place in range(len(first) - 1, -1, -1):
        tail = series(layout.comma, first[place], tail) if place else series(first[0], tail)
        if place >= least:
            tail = optional(tail)
    return series("[", tail, "]")


def _items_of(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    items, more = schema.get("items", schema.get("unevaluatedItems", True)), schema.get("additionalItems", True)
    if isinstance(items, list):  # of drafts before 2020
        return items, more
    return list(schema.get("prefixItems", [])), items


def _unique(least: int, most: int | None, prefix: list[Any], rest: Any) -> tuple[int, int | None, list[Any], Any]:
    """Keep items from repeating: where their values are listed, or there is one at most."""
    if most is not None and most <= 1:
        return least, most, prefix, rest
    raise GrammarError("uniqueItems is supported for arrays of at most one item")
