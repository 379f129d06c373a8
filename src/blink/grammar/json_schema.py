# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as expressions. What is generated is always valid; what cannot be promised is refused by its keyword.

Members come in the order in which the schema declares them, and only those that it declares; see
docs/structured-output.md.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.expression import NEVER, Call, Expression, choice
from blink.grammar.json_text import BOOLEAN, Layout
from blink.grammar.schema_containers import compile_array, compile_object
from blink.grammar.schema_merge import Schema, constraints, merge_inside, types_of
from blink.grammar.schema_overlap import check_one_of
from blink.grammar.schema_scalars import compile_number, compile_string

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_MAX_SCHEMAS = 20_000
_MAX_DEPTH = 48
_MAX_VALUES = 4096
_REFUSED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy",
}  # fmt: skip
_KINDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties", "unevaluatedProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}  # fmt: skip
SHARED, INLINE, UNIONS = "shared", "inline", "unions"  # what a $ref becomes: a call; its target; that, if it must


class SchemaCompiler:
    """Compile the parts of one schema.

    Args:
        mode: SHARED makes a rule of each target of a $ref; INLINE only of those that hold themselves; UNIONS, of the
            alternatives in these.
        prefix: of the rules' names.
    """

    def __init__(self, root: Schema, layout: Layout, mode: str, prefix: str = "") -> None:
        self.layout = layout
        self._prefix = prefix
        self.rules: dict[str, Expression] = layout.any_rules()
        self._root = root
        self._mode = mode
        self._open: list[tuple[str, bool]] = []  # references and alternatives around, and whether they are such
        self._called: set[str] = set()
        self._num_schemas = 0
        self._depth = 0

    def compile(self, schema: Any) -> Expression:
        """Return the values that a schema allows; NEVER if none.

        Raises:
            GrammarError: it is malformed, or has a keyword that cannot be kept.
        """
        self._num_schemas += 1
        self._depth += 1
        if self._num_schemas > _MAX_SCHEMAS:
            raise GrammarTooLargeError(f"it has more than {_MAX_SCHEMAS} parts, references resolved")
        if self._depth > _MAX_DEPTH:
            raise GrammarTooLargeError(f"it is nested more than {_MAX_DEPTH} levels deep")
        try:
            if isinstance(schema, bool):
                return self.layout.any_value if schema else NEVER
            if not isinstance(schema, Mapping):
                raise GrammarError(f"a schema is an object or a boolean, got {type(schema).__name__}")
            return self._compile_object(constraints(schema))
        finally:
            self._depth -= 1

    def resolve(self, reference: Any) -> Schema:
        """Return what a $ref of this schema means.

        Raises:
            GrammarError: it is of another document, or of nothing.
        """
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise GrammarError(f"$ref {str(reference)[:80]!r} is not of this schema (such as #/$defs/name)")
        found: Any = self._root
        for part in reference.split("/")[1:]:
            name = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise GrammarError(f"$ref {reference[:80]!r} leads nowhere")
        return found

    def _compile_object(self, schema: dict[str, Any]) -> Expression:
        for name in sorted(_REFUSED & schema.keys()):
            raise GrammarError(f"the keyword {name!r} is not supported")
        if "$ref" in schema and len(schema) == 1:
            return self._refer(schema["$ref"])
        if "$ref" in schema:
            reference = schema.pop("$ref")
            return self.compile(merge_inside(schema, [self.resolve(reference)], self.resolve))
        if "allOf" in schema:
            parts = schema.pop("allOf")
            _check_list("allOf", parts)
            return self.compile(merge_inside(schema, parts, self.resolve))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._compile_options(name, schema)
        if "const" in schema or "enum" in schema:
            return self._compile_values(schema)
        return choice([self._compile_type(kind, schema) for kind in self._kinds(schema)])

    def _refer(self, reference: str) -> Expression:
        target = self.resolve(reference)
        is_open = (reference, False) in self._open
        if self._mode == UNIONS and is_open:
            # A union on the way cuts the recursion at its next turn.
            is_open = not any(is_union for _, is_union in self._open[self._open.index((reference, False)) + 1 :])
        if is_open or self._mode == SHARED:
            return self._call(self._prefix + reference, reference, target)
        self._open.append((reference, False))
        try:
            return self.compile(target)
        finally:
            self._open.pop()

    def _call(self, name: str, reference: str, schema: Any) -> Expression:
        if name not in self._called:
            self._called.add(name)
            around, self._open = self._open, [(reference, False)]
            self.rules[name] = self.compile(schema)
            self._open = around
        return Call(name)

    def _compile_options(self, name: str, schema: dict[str, Any]) -> Expression:
        key = f"{self._prefix}union {id(schema[name])}"
        if self._mode == UNIONS:
            if (key, True) in self._open or key in self._called:
                return self._call_union(key, name, schema)
            self._open.append((key, True))
        try:
            return self._compile_each(name, schema)
        finally:
            if self._mode == UNIONS:
                self._open.pop()

    def _call_union(self, key: str, name: str, schema: dict[str, Any]) -> Expression:
        if key not in self._called:
            self._called.add(key)
            around, self._open = self._open, [(key, True)]
            self.rules[key] = self._compile_each(name, schema)
            self._open = around
        return Call(key)

    def _compile_each(self, name: str, schema: dict[str, Any]) -> Expression:
        options = schema[name]
        _check_list(name, options)
        rest = {key: value for key, value in schema.items() if key != name}
        merged = [merge_inside(dict(rest), [option], self.resolve) for option in options] if rest else list(options)
        if name == "oneOf":
            check_one_of(merged, self.resolve)
        return choice([self.compile(option) for option in merged])

    def _compile_values(self, schema: dict[str, Any]) -> Expression:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        _check_list("enum", values)
        if len(values) > _MAX_VALUES:
            raise GrammarTooLargeError(f"an enum may have {_MAX_VALUES} values")
        if "const" in schema and "enum" in schema:
            values = [value for value in values if value in schema["enum"]]
        rest = schema.keys() - {"const", "enum", "type"}
        if any(rest & names for names in _KINDS.values()):
            raise GrammarError("an enum together with other constraints is not supported")
        kinds = self._kinds(schema) if "type" in schema else _TYPES
        return choice([self.layout.literal(value) for value in values if _type_of(value) & {*kinds}])

    def _kinds(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the types to generate: those that are named, or that the other keywords speak of."""
        kinds = types_of(schema)
        if kinds is None:
            kinds = [kind for kind, names in _KINDS.items() if names & schema.keys()]
            return kinds or list(_TYPES)
        for kind in kinds:
            if kind not in _TYPES:
                raise GrammarError(f"{kind!r} is no type" if kind != "any" else "the type 'any' is not of JSON Schema")
        return [kind for kind in kinds if kind != "integer" or "number" not in kinds]

    def _compile_type(self, kind: str, schema: Mapping[str, Any]) -> Expression:
        try:
            if kind == "object":
                return compile_object(self, schema)
            if kind == "array":
                return compile_array(self, schema)
            if kind == "string":
                return compile_string(schema)
            if kind in ("integer", "number"):
                return compile_number(schema, is_integer=kind == "integer")
            return BOOLEAN if kind == "boolean" else self.layout.literal(None)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise GrammarError(f"a keyword of type {kind!r} has a value that it cannot have ({error})") from None


def _check_list(name: str, value: object) -> None:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name!r} must be a list that is not empty")


def _type_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if value is None:
        return {"null"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
