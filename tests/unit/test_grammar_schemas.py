# SPDX-License-Identifier: Apache-2.0
"""JSON schemas: what an automaton lets through is valid, by the jsonschema package, and comes to an end."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from automata import PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.structured_outputs import StructuredOutputsParams
from json_schemas import PROGRAMS, Case, exactly, read_suite
from value_walks import draw_values, walks, without_undeclared

FORMATS = ("date", "uuid", "email", "ipv4", "ipv6")


def compile_schema(schema: Any) -> PlainAutomaton:
    return PlainAutomaton(compile_structured(StructuredOutputsParams(json=schema)).data)


def encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def check(case: Case) -> bool:
    """Check what an automaton allows; return whether there is one."""
    try:
        automaton = compile_schema(case.schema)
    except BadRequestError as error:
        assert error.message.startswith("structured_outputs cannot be compiled: ")
        return False
    validator = jsonschema.Draft202012Validator(exactly(case.schema))
    where = f"{case.file}: {case.description}"
    for value, is_valid in case.tests:
        assert is_valid or not walks(automaton, value), f"{where} lets {value!r} through"
        assert not is_valid or walks(automaton, value) or is_left_out(case, automaton, value), (
            f"{where} has no {value!r}"
        )
    # Python's patterns, which the validator takes, have no \\p.
    for value in draw_values(automaton, 0 if "\\\\p" in json.dumps(case.schema) else 8):
        assert validator.is_valid(value), f"{where} lets {value!r} through"
    return True


def is_left_out(case: Case, automaton: PlainAutomaton, value: Any) -> bool:
    """Say whether a valid value is not written for a reason that docs/json-schema.md has."""
    text = json.dumps(value, ensure_ascii=False)
    if case.file == "format":  # there formats are annotations
        return True
    if not text.isascii() and re.search(r"\\\\[dDwWsS]", json.dumps(case.schema)):  # these are classes of ASCII
        return True
    if (
        isinstance(value, int) and case.schema.get("const") == value
    ):  # -2 for -2.0: numbers are written as they are named
        return True
    if "if" in case.schema and not case.schema.keys() & {"then", "else"}:  # what an `if` alone has evaluated
        return True
    wide = automaton
    if "type" not in case.schema:  # only the types of which its keywords speak are written
        wide = compile_schema({"type": type_of(value), **case.schema})
        if walks(wide, value):
            return True
    if not isinstance(value, dict):
        return False
    # Members that are not declared, at all or by the options that the others are of.
    return walks(wide, without_undeclared(wide, value)) or any(
        walks(wide, {other: member for other, member in value.items() if other != name}) for name in value
    )


def type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


# The others are refused: docs/json-schema.md.
@pytest.mark.parametrize(("step", "compiled"), [(4, 86), pytest.param(1, 351, marks=pytest.mark.long)])
def test_the_public_suite_s_valid_values_can_be_written_and_no_others(step: int, compiled: int) -> None:
    suite = read_suite()
    assert len(suite) == 416
    assert sum(check(case) for case in suite[::step]) >= compiled


def test_schemas_that_hold_in_all_drafts_are_not_refused() -> None:
    """Whatever else is refused, these are what the files of the suite are about."""
    files = {"properties", "required", "items", "prefixItems", "enum", "const", "anyOf", "maximum", "minLength", "ref"}
    compiled = {case.file for case in read_suite() if case.file in files and check(case)}
    assert compiled == files


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_programs_schemas_let_through_is_valid(name: str) -> None:
    schema = PROGRAMS[name]
    automaton = compile_schema(schema)
    values = draw_values(automaton, 60)
    assert values
    for value in values:
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker(FORMATS))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_kept(name: str) -> None:
    schema = {"type": "string", "format": name}
    for value in draw_values(compile_schema(schema), 40):
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker([name]))


@pytest.mark.parametrize("low", [-1000, -37, -1, 0, 1, 9, 10, 99, 480])
@pytest.mark.parametrize("span", [0, 1, 9, 90, 1234])
def test_integers_between_bounds_are_exactly_those(low: int, span: int) -> None:
    automaton = compile_schema({"type": "integer", "minimum": low, "maximum": low + span})
    for value in {*range(low - 12, low + 13), *range(low + span - 12, low + span + 13), 0, 10**6, -(10**6)}:
        assert automaton.accepts(encode(value)) == (low <= value <= low + span), value


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 0, "maximum": 1}, ["0", "1", "0.5", "0.999", "1.0"], ["1.001", "-0.1", "2"]),
        ({"exclusiveMinimum": 0}, ["0.001", "7", "123.456"], ["0", "0.0", "-1"]),
        ({"minimum": -1.5, "exclusiveMaximum": 2.25}, ["-1.5", "2.2", "2.249", "0"], ["2.25", "-1.51", "2.250"]),
        ({"minimum": 0.2, "maximum": 0.8}, ["0.2", "0.5", "0.80"], ["0.1", "0.81", "0", "1"]),
        ({"minimum": 5, "exclusiveMinimum": True}, ["6", "5.1"], ["5", "5.0"]),
    ],
)
def test_numbers_between_bounds_have_decimals(bounds: dict[str, Any], inside: list[str], outside: list[str]) -> None:
    automaton = compile_schema({"type": "number", **bounds})
    assert all(automaton.accepts(text.encode()) for text in inside)
    assert not any(automaton.accepts(text.encode()) for text in outside)


def test_multiples_are_exactly_those() -> None:
    automaton = compile_schema({"type": "integer", "multipleOf": 7})
    for value in range(-100, 400):
        assert automaton.accepts(encode(value)) == (value % 7 == 0)


@pytest.mark.parametrize("length", [0, 1, 47, 48, 96, 97, 150, 500, 501])
def test_texts_of_bounded_length_are_as_long_as_they_may_be(length: int) -> None:
    """Longer repetitions are built of blocks: their borders are where an error would be."""
    automaton = compile_schema({"type": "string", "minLength": 96, "maxLength": 500})
    for text in ("x" * length, "é" * length, '"' * length):
        assert automaton.accepts(encode(text)) == (96 <= length <= 500)


def test_nesting_is_bounded_by_the_stack_and_never_ends_in_nothing() -> None:
    automaton = compile_schema({"type": "object", "properties": {"a": {"$ref": "#"}}})
    for depth in (1, 10, 57):
        assert automaton.accepts(b'{"a":' * depth + b"{}" + b"}" * depth)
    assert not automaton.accepts(b'{"a":' * 80 + b"{}" + b"}" * 80)
    anything, place = compile_schema(True), compile_schema(True).start
    for _ in range(1000):  # as deep as it goes: other values still fit
        found = anything.take(place, ord("["))
        if found is None:
            break
        place = found
    assert any(anything.take(place, byte) for byte in b'0"]')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "not": {"additionalProperties": {"type": "string"}}}, "'not'"),
        ({"$dynamicRef": "#a"}, "'$dynamicRef'"),
        ({"$ref": "https://example.org/schema"}, "is not of this schema"),
        ({"$ref": "#/$defs/missing"}, "leads nowhere"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}},
                                               "required": ["n"]}}}, "no finite text"),
        ({"type": "strin"}, "'strin' is no type"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-behinds"),
        ({"type": "string", "minLength": -1}, "must be a count"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"enum": []}, "'enum'"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no finite text"),
        (False, "no finite text"),
    ],
)  # fmt: skip
def test_what_cannot_be_promised_is_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(BadRequestError) as failure:
        compile_schema(schema)
    assert reason in failure.value.message and failure.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"not": {"anyOf": [{"maxLength": 3}, {"minimum": 5}]}}, [], [0, 7, "a", "abcd", None, [], {}]),
        ({"oneOf": [{"oneOf": [{"maxProperties": 0}]}, {}]}, [{"a": 1}], [0, "a", {}, [], None]),
        ({"if": {"anyOf": [{"maxItems": 1}, {"required": ["a"]}]}, "then": {"type": ["string", "array"]},
          "else": {"type": "null"}}, ["a", [1, 2]], [None, {}, 5]),
        ({"type": ["integer", "string"], "not": {"oneOf": [{"minimum": 5}, {"maxLength": 2}]}}, [7, "a"], [4, "abc"]),
    ],
)  # fmt: skip
def test_options_without_a_type_are_of_all_types_where_they_are_negated(
    schema: Any, allowed: list[Any], forbidden: list[Any]
) -> None:
    try:
        automaton = compile_schema(schema)
    except BadRequestError as refusal:
        assert "no finite text" in refusal.message and not allowed
        return
    assert [value for value in allowed if not walks(automaton, value)] == []
    assert [value for value in forbidden if walks(automaton, value)] == []


@pytest.mark.parametrize("more", [{}, {"additionalProperties": True}, {"patternProperties": {"^b": {}}}])
@pytest.mark.parametrize("listed", [{}, {"a": {"type": "integer"}}, {"a": {}, "b": {"type": "null"}}])
def test_an_object_of_no_members_is_empty(listed: dict[str, Any], more: dict[str, Any]) -> None:
    automaton = compile_schema({"type": "object", "properties": listed, "maxProperties": 0, **more})
    assert walks(automaton, {})
    assert not any(walks(automaton, value) for value in ({"a": 1}, {"b": None}, {"c": 1}, {"a": 1, "b": None}))
