# SPDX-License-Identifier: Apache-2.0
"""What each keyword of JSON Schema means, as sets of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from typing import Any

from blink.grammar.budget import spend
from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.forms import Form, any_form, form_of_types, form_of_values, no_form
from blink.grammar.language import ANY_TEXTS, NO_TEXTS, Language, texts
from blink.grammar.nodes import ANYTHING, NOTHING, Node
from blink.grammar.pattern import pattern_language
from blink.grammar.readings import Reading
from blink.grammar.schema_index import SchemaIndex
from blink.grammar.schema_scalars import count_of, numbers_of_schema, strings_of_schema
from blink.grammar.shapes import ArrayShape, Contained, NameClasses, ObjectShape, names_shape

KINDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas",
               "dependencies"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems",
              "contains", "minContains", "maxContains"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}  # fmt: skip
_MAX_DEPTH = 150
_LOOK_DEPTH = 5  # how deep it is asked whether there is a value


class SchemaForms:
    """The sets of values of one schema's parts."""

    def __init__(self, root: Any) -> None:
        self._index = SchemaIndex(root)
        self._known: dict[tuple[Node, Reading], Form] = {}
        self._open: set[tuple[Node, Reading]] = set()
        self._looks_at_unevaluated = self._index.mentions("unevaluatedProperties", "unevaluatedItems")

    def node(self, schema: Any) -> Node:
        """Return the node of a part of the schema."""
        return self._index.node(schema)

    def form(self, node: Node, reading: Reading = Reading.USUAL) -> Form:
        """Return the values that a node allows.

        Raises:
            GrammarError: a keyword has a value that it cannot have, or cannot be kept.
        """
        key = (node, reading)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            raise GrammarError("a $ref leads to itself with nothing between")
        spend(1)
        if len(self._open) > _MAX_DEPTH:
            raise GrammarTooLargeError("it is nested too deeply, references resolved")
        self._open.add(key)
        try:
            found = self._known[key] = self._form(node, reading)
        finally:
            self._open.discard(key)
        return found

    def is_void(self, node: Node, depth: int = 0) -> bool:
        """Say whether it can be seen that a node allows no value."""
        if depth > _LOOK_DEPTH:
            return False
        try:
            return self.is_void_form(self.form(node, Reading.OUTER), depth)
        except GrammarTooLargeError:
            return False

    def is_void_form(self, form: Form, depth: int = 0) -> bool:
        """Say whether it can be seen that there is no value in a set."""
        if form.null or form.booleans or not form.numbers.is_empty or not form.strings.is_empty:
            return False
        return all(self._is_void_object(shape, depth) for shape in form.objects) and all(
            self._is_void_array(shape, depth) for shape in form.arrays
        )

    def _is_void_object(self, shape: ObjectShape, depth: int) -> bool:
        return shape.is_impossible or any(self.is_void(shape.member(name), depth + 1) for name in shape.required)

    def _is_void_array(self, shape: ArrayShape, depth: int) -> bool:
        count = min(shape.least, len(shape.prefix) + 1)
        return shape.is_impossible or any(self.is_void(shape.item(index), depth + 1) for index in range(count))

    def _form(self, node: Node, reading: Reading) -> Form:
        if node is ANYTHING:
            return any_form()
        if node is NOTHING:
            return no_form()
        kind, inside = node.key
        if kind == "not":
            return self.form(inside, reading.of_negation).others()
        if kind == "and":
            found = reduce(Form.__and__, (self.form(part, reading.of_parts) for part in inside))
            schemas = [part.schema for part in inside]
        else:
            found, schemas = self._of_schema(node.schema, reading.of_parts), [node.schema]
        return self._narrowed(found, schemas) if reading is Reading.NARROW else found

    def _narrowed(self, form: Form, schemas: Sequence[Any]) -> Form:
        kinds: set[str] = set()
        for schema in schemas:
            if not isinstance(schema, Mapping) or schema.keys() & {"type", "enum", "const", "not"}:
                return form
            kinds.update(kind for kind, names in KINDS.items() if names & schema.keys())
            if "$ref" in schema or "allOf" in schema or "if" in schema:
                return form if not kinds or "$ref" in schema else form & form_of_types(kinds)
        if not kinds:
            return form
        narrow = form & form_of_types(kinds)
        return form if narrow.is_empty else narrow

    def _of_schema(self, schema: Mapping[str, Any], reading: Reading) -> Form:
        self._index.check_supported(schema)
        found = any_form() if "type" not in schema else form_of_types(self._index.types_of(schema))
        if "const" in schema:
            found = found & form_of_values([schema["const"]])
        if "enum" in schema:
            found = found & form_of_values(schema["enum"])
        if KINDS["string"] & schema.keys():
            found = found & replace(any_form(), strings=strings_of_schema(schema, is_outer=reading is Reading.OUTER))
        if KINDS["number"] & schema.keys():
            found = found & replace(any_form(), numbers=numbers_of_schema(schema))
        if KINDS["object"] & schema.keys():
            found = found & self._objects_of(schema, reading)
        if KINDS["array"] & schema.keys():
            found = found & replace(any_form(), arrays=(self._array_of(schema),))
        found = self._with_applicators(found, schema, reading)
        return self._with_unevaluated(found, schema) if self._looks_at_unevaluated else found

    def _with_applicators(self, found: Form, schema: Mapping[str, Any], reading: Reading) -> Form:
        if "$ref" in schema:
            found = found & self.form(self.node(self._index.resolve(schema)), reading)
        for part in schema.get("allOf", ()):
            found = found & self.form(self.node(part), reading)
        if "anyOf" in schema:
            found = found & _joined([self.form(self.node(option), reading.of_options) for option in schema["anyOf"]])
        if "oneOf" in schema:
            found = found & self._one_of(schema["oneOf"], _always_required(found), reading)
        if "not" in schema:
            found = found & self.form(~self.node(schema["not"]), reading)
        if "if" in schema and schema.keys() & {"then", "else"}:
            condition = self.node(schema["if"])
            then, otherwise = self.node(schema.get("then", True)), self.node(schema.get("else", True))
            found = found & (
                self.form(condition, reading.of_conditions) & self.form(then, reading)
                | self.form(~condition & otherwise, reading)
            )
        return found

    def _one_of(self, options: Sequence[Any], required: Set[str], reading: Reading) -> Form:
        """Return what exactly one of the options allows: what any does but not two; required: beside the options."""
        wide = [self.form(self.node(option), reading.of_negation) for option in options]
        _, twice = self._any_and_two(wide, required)
        found = _joined([self.form(self.node(option), reading.of_options) for option in options])
        return found if twice.is_empty else found & twice.others()

    def _any_and_two(self, forms: Sequence[Form], required: Set[str]) -> tuple[Form, Form]:
        """Return what any of some sets has, and what two of them have."""
        if len(forms) == 1:
            return forms[0], no_form()
        middle = len(forms) // 2
        one, two_of_one = self._any_and_two(forms[:middle], required)
        other, two_of_other = self._any_and_two(forms[middle:], required)
        near = tuple(each for each in one.objects if not self._are_apart(each, other.objects, required))
        both = replace(one, objects=near) & other
        twice = two_of_one | two_of_other
        return one | other, twice if self.is_void_form(both) else twice | self._without_void(both)

    def _are_apart(self, shape: ObjectShape, others: Sequence[ObjectShape], required: Set[str]) -> bool:
        """Say whether a required member of an object tells it from others; a cheap look before a thorough one."""
        spend(1 + len(others) // 2)
        return all(
            any(
                self._tells_apart(shape.member(name), other.member(name))
                for name in {**shape.required, **dict.fromkeys(required)}
                if name in other.required or name in required
            )
            for other in others
        )

    def _tells_apart(self, one: Node, other: Node) -> bool:
        if one is ANYTHING or other is ANYTHING or one == other:
            return False
        forms = (self.form(one, Reading.OUTER), self.form(other, Reading.OUTER))
        if any(form.objects or form.arrays for form in forms):
            return False
        return (forms[0] & forms[1]).is_empty

    def _without_void(self, form: Form) -> Form:
        return replace(
            form,
            objects=tuple(shape for shape in form.objects if not self._is_void_object(shape, 0)),
            arrays=tuple(shape for shape in form.arrays if not self._is_void_array(shape, 0)),
        )

    def _objects_of(self, schema: Mapping[str, Any], reading: Reading) -> Form:
        listed = {name: self.node(value) for name, value in schema.get("properties", {}).items()}
        patterns = [
            (pattern_language(name), self.node(value)) for name, value in schema.get("patternProperties", {}).items()
        ]
        has_more = "additionalProperties" in schema
        more = self.node(schema.get("additionalProperties", True))
        for language, node in patterns:
            listed = {name: member & node if language.matches(name) else member for name, member in listed.items()}
        rest = _name_classes(patterns, more)
        shape = ObjectShape(
            listed,
            dict.fromkeys(schema.get("required", ())),
            rest,
            int(schema.get("minProperties", 0)),
            count_of(schema, "maxProperties"),
            writes_rest=bool(patterns) or has_more,
            evaluated=self._evaluated_names(listed, patterns, has_more),
        )
        if "propertyNames" in schema:
            names = self.form(self.node(schema["propertyNames"]), reading).strings
            allowed = reduce(Language.__or__, (part.exact for part in names.parts), NO_TEXTS)
            shape = shape & names_shape(allowed, ANYTHING, NOTHING)
        found = replace(any_form(), objects=(shape,))
        for name, needed in self._index.dependencies_of(schema):
            present = ObjectShape(required={name: None})
            if isinstance(needed, list):
                then = replace(any_form(), objects=(present & ObjectShape(required=dict.fromkeys(needed)),))
            else:
                then = replace(any_form(), objects=(present,)) & self.form(self.node(needed), reading)
            absent = replace(any_form(), objects=(ObjectShape({name: NOTHING}),))
            found = found & (absent | then)
        return found

    def _evaluated_names(
        self, listed: Mapping[str, Node], patterns: Sequence[tuple[Language, Node]], has_more: bool
    ) -> Language:
        if not self._looks_at_unevaluated:
            return NO_TEXTS
        if has_more:
            return ANY_TEXTS
        return reduce(Language.__or__, (language for language, _ in patterns), texts(listed))

    def _array_of(self, schema: Mapping[str, Any]) -> ArrayShape:
        items, more = schema.get("items", True), schema.get("additionalItems", True)
        prefix = schema.get("prefixItems", ())
        has_rest = "items" in schema
        if isinstance(items, list):  # of drafts before 2020
            prefix, items, has_rest = items, more, "additionalItems" in schema
        contained: tuple[Contained, ...] = ()
        if "contains" in schema:
            contained = (
                Contained(
                    self.node(schema["contains"]), int(schema.get("minContains", 1)), count_of(schema, "maxContains")
                ),
            )
        return ArrayShape(
            tuple(self.node(item) for item in prefix),
            self.node(items),
            int(schema.get("minItems", 0)),
            count_of(schema, "maxItems"),
            schema.get("uniqueItems") is True,
            contained,
            None if has_rest else len(prefix),
        )

    def _with_unevaluated(self, found: Form, schema: Mapping[str, Any]) -> Form:
        objects, arrays = found.objects, found.arrays
        if "unevaluatedProperties" in schema:
            more = self.node(schema["unevaluatedProperties"])
            objects = tuple(_with_unevaluated_names(shape, more) for shape in objects)
        if "unevaluatedItems" in schema:
            more = self.node(schema["unevaluatedItems"])
            arrays = tuple(_with_unevaluated_items(shape, more) for shape in arrays)
        return replace(found, objects=objects, arrays=arrays)


def _name_classes(patterns: Sequence[tuple[Language, Node]], more: Node) -> NameClasses:
    """Return all names by which of some patterns they match; those that match none are of `more`."""
    classes: list[tuple[Language, Node, bool]] = [(ANY_TEXTS, ANYTHING, False)]
    for language, node in patterns:
        classes = [
            each
            for names, known, is_matched in classes
            for each in ((names & language, known & node, True), (names - language, known, is_matched))
            if not each[0].is_empty
        ]
        if len(classes) > 64:
            raise GrammarTooLargeError("too many patternProperties overlap")
    return tuple((names, known if is_matched else more) for names, known, is_matched in classes)


def _with_unevaluated_names(shape: ObjectShape, more: Node) -> ObjectShape:
    if shape.evaluated == ANY_TEXTS:
        return shape
    added = names_shape(ANY_TEXTS - shape.evaluated, more, writes_rest=True)
    return replace(shape & added, evaluated=ANY_TEXTS)


def _with_unevaluated_items(shape: ArrayShape, more: Node) -> ArrayShape:
    if shape.evaluated is None:
        return shape
    if shape.contained:
        raise GrammarError("'unevaluatedItems' beside 'contains' is not supported")
    added = ArrayShape((ANYTHING,) * shape.evaluated, more)
    return replace(shape & added, evaluated=None)


def _joined(forms: Sequence[Form]) -> Form:
    """Return the union of some sets, as a tree: of many it is cheaper than one after the other."""
    if len(forms) == 1:
        return forms[0]
    middle = len(forms) // 2
    return _joined(forms[:middle]) | _joined(forms[middle:])


def _always_required(form: Form) -> Set[str]:
    """Return the members that all objects of a set have."""
    return (
        frozenset.intersection(*(frozenset(shape.required) for shape in form.objects)) if form.objects else frozenset()
    )
