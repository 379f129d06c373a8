# SPDX-License-Identifier: Apache-2.0
"""Schemas of all kinds, sound and not: each is compiled or refused, soon, and what is drawn is valid."""

from __future__ import annotations

import contextlib
import decimal
import json
import random
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema.validators
import pytest
import referencing.exceptions
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from automata import PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.structured_outputs import StructuredOutputsParams
from cpu_seconds import forget_automata, least_seconds
from json_schemas import exactly
from value_walks import draw_values

_MAX_SECONDS = 3.0  # of a core, on a machine that does much else
_GATE_SECONDS, _LONG_SECONDS = 1.0, 60.0  # of a core, for each of two tests
_GATE_TRIED, _GATE_COMPILED = 60, 20  # at least, however long that takes

SCHEMAS = ["additionalProperties", "unevaluatedProperties", "propertyNames", "additionalItems", "unevaluatedItems",
           "contains", "not", "if", "then", "else", "items"]  # fmt: skip
LISTS = ["allOf", "anyOf", "oneOf", "prefixItems"]
MAPS = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"]
COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
          "maxContains"]  # fmt: skip
NUMBERS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
OTHERS = ["type", "enum", "const", "required", "dependentRequired", "uniqueItems", "pattern", "format", "$ref", "$id",
          "$schema", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "id", "title", "default",
          "extends", "disallow", "divisibleBy", "contentEncoding", "readOnly", "nullable"]  # fmt: skip
KEYWORDS = [*SCHEMAS, *LISTS, *MAPS, *COUNTS, *NUMBERS, *OTHERS]
# Of each JSON type, sound ones for some keyword among them.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 5, -1, 2.5, 1e300, 10**40),
    *("", "a", "string", "(", "^a+$", "date", "\ud800", "#", "#/x"),
    *([], ["a"], ["string", "null"], [5], [None], [{}], [True], [{"type": "integer"}, False]),
    *({}, {"type": "string"}, {"a": {}}, {"a": ["b"]}, {"a": 5}, {"^(a+)+$": {"type": "null"}}, {"type": 5}),
    {"a": {"$ref": "#"}},
]
COMBINATORS: dict[str, Any] = {
    "alone": lambda schema: schema,
    "allOf": lambda schema: {"allOf": [schema, {"minimum": 1, "maxLength": 9}]},
    "anyOf": lambda schema: {"type": ["object", "array", "string"], "anyOf": [{"const": 1}, schema]},
    "oneOf": lambda schema: {"oneOf": [{"type": "boolean"}, schema, {"required": ["a"]}]},
    "not": lambda schema: {"not": schema},
    "if": lambda schema: {"if": schema, "then": {"maxLength": 3}, "else": {"type": ["null", "number"]}},
    "$ref": lambda schema: {"$defs": {"a": schema}, "$ref": "#/$defs/a", "type": ["string", "object"]},
    "properties": lambda schema: {"type": "object", "properties": {"a": schema, "b": schema}, "minProperties": 1},
    "items": lambda schema: {"type": "array", "items": schema, "maxItems": 3, "minItems": 1},
}


def compile_anew(params: StructuredOutputsParams) -> None:
    """Compile or refuse once more, with nothing remembered."""
    forget_automata()
    with contextlib.suppress(BadRequestError):
        compile_structured(params)


def check_answer(schema: Any, num_drawn: int = 4) -> bool:
    """Check that a schema is compiled or refused, soon, and that what is drawn is valid; return which."""
    params = StructuredOutputsParams(json=schema)
    data: bytes | None = None
    began = time.process_time()
    try:
        data = compile_structured(params).data
    except BadRequestError as refusal:
        assert refusal.param == "structured_outputs" and len(refusal.message) < 2000
    if time.process_time() - began > _MAX_SECONDS:
        assert least_seconds(lambda: compile_anew(params), enough=_MAX_SECONDS) < _MAX_SECONDS, schema
    if data is None:
        return False
    values = draw_values(PlainAutomaton(data), num_drawn)
    validator = sound_validator(schema)
    for value in values if validator else []:
        assert is_valid(validator, value), f"{value!r} of {schema!r}"
    return True


def sound_validator(schema: Any) -> Any:
    """Return jsonschema's validator; None: it does not take the schema, or reads it in another way."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    of_draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator) if named else None
    has_older = re.search('"(dependencies|additionalItems)"', json.dumps(schema))
    of_draft = of_draft or (jsonschema.Draft7Validator if has_older else jsonschema.Draft202012Validator)
    try:
        of_draft.check_schema(schema)
    except (jsonschema.SchemaError, OverflowError, UnicodeError):
        return None
    return of_draft(exactly(schema), format_checker=of_draft.FORMAT_CHECKER)


def is_valid(validator: Any, value: Any) -> bool:
    try:
        with warnings.catch_warnings(), decimal.localcontext(decimal.Context(prec=1000)):
            warnings.simplefilter("ignore", FutureWarning)
            return bool(validator.is_valid(value))
    except (re.error, RecursionError):  # of the validator
        return True
    except referencing.exceptions.Unresolvable:  # a reference without effect that leads nowhere
        return True
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of the validator's part in Rust: endless references
            return True
        raise


def table() -> Iterator[tuple[str, Any, str]]:
    """Return each keyword with each value in each combinator, in an order that a budget of time cuts fairly."""
    cases = [(keyword, value, combinator) for keyword in KEYWORDS for value in VALUES for combinator in COMBINATORS]
    random.Random(45).shuffle(cases)
    return iter(cases)


def check_table(seconds: float, at_least: int = 0) -> tuple[int, int]:
    end = time.process_time() + seconds
    num_tried = num_compiled = 0
    for keyword, value, combinator in table():
        if num_tried >= at_least and time.process_time() > end:
            break
        num_tried += 1
        num_compiled += check_answer(COMBINATORS[combinator]({keyword: value}), 2)
    return num_tried, num_compiled


def test_each_keyword_with_each_value_in_each_combinator_is_answered() -> None:
    num_tried, num_compiled = check_table(_GATE_SECONDS, _GATE_TRIED)
    assert num_tried >= _GATE_TRIED and num_compiled > _GATE_COMPILED


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_of_the_table_is_answered() -> None:
    num_tried, num_compiled = check_table(600)
    print(f"{num_tried} schemas, {num_compiled} compiled")
    assert num_tried == len(KEYWORDS) * len(VALUES) * len(COMBINATORS)


names = st.sampled_from(["a", "b", "c"])
scalars = st.sampled_from([None, True, 0, 1, -3, 2.5, 7, "", "a", "ab", "x1"])
values = st.recursive(
    scalars, lambda inside: st.lists(inside, max_size=2) | st.dictionaries(names, inside, max_size=2), max_leaves=3
)
patterns = st.sampled_from(["a", "^a", "b$", "^[a-c]{1,3}$", "^x-", "[0-9]", "^(?!a)", "^(a|bc)*$"])
counts = st.integers(0, 4)
leaves: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
    | st.just(["string", "null"])
    | st.just(["integer", "array", "object"]),
    "enum": st.lists(values, min_size=1, max_size=4),
    "const": values,
    "required": st.lists(names, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
    "uniqueItems": st.booleans(),
    "pattern": patterns,
    # Without those of which Blink leaves out some texts: what is not one of the others may be one of these.
    "format": st.sampled_from(["date", "ipv4", "ipv6", "uuid", "json-pointer", "int32"]),
    "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#b", "#/properties/a"]),
    **dict.fromkeys(COUNTS, counts),
    **dict.fromkeys(NUMBERS[:4], st.sampled_from([-2, 0, 0.5, 1, 3, 10, 12.25])),
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.01]),
}


def of_schemas(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of up to four keywords."""
    keywords: dict[str, st.SearchStrategy[Any]] = {
        **leaves,
        **dict.fromkeys(set(SCHEMAS) - {"additionalItems"}, inside),
        **dict.fromkeys(LISTS, st.lists(inside, min_size=1, max_size=3)),
        **dict.fromkeys(("properties", "$defs", "dependentSchemas"), st.dictionaries(names, inside, max_size=3)),
        "patternProperties": st.dictionaries(patterns, inside, max_size=2),
    }
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda found: st.fixed_dictionaries({name: keywords[name] for name in found}))


flat = st.booleans() | st.lists(st.sampled_from(sorted(leaves)), max_size=2, unique=True).flatmap(
    lambda found: st.fixed_dictionaries({name: leaves[name] for name in found})
)
schemas = of_schemas(of_schemas(flat) | flat)


def check_combinations(seconds: float, start: int, at_least: int = 0) -> tuple[int, int]:
    """Try rounds of schemas until a time has passed and so many were tried; the rounds are the same each time."""
    end = time.process_time() + seconds
    tried = [0, 0]

    def is_over() -> bool:
        return sum(tried) >= at_least and time.process_time() >= end

    @given(schemas)
    @settings(max_examples=50, database=None)
    def check_round(schema: Any) -> None:
        if not is_over():
            tried[check_answer(schema)] += 1

    number = start
    while not is_over():
        seed(number)(check_round)()
        number += 1
    return tried[0], tried[1]


def test_combinations_of_keywords_are_answered() -> None:
    num_refused, num_compiled = check_combinations(_GATE_SECONDS, 0, _GATE_TRIED)
    assert num_refused + num_compiled >= _GATE_TRIED and num_compiled > _GATE_COMPILED


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_combinations_of_keywords_are_answered() -> None:
    num_refused, num_compiled = check_combinations(2 * _LONG_SECONDS, 1000)
    print(f"{num_compiled} compiled, {num_refused} refused")
    assert num_compiled > 300


NUMBER = {"type": "number", "minimum": -1.234567e-30, "maximum": 1.2345e40}
# Schemas whose parts are many, or long, or nested in each other: each once took seconds of a core.
LARGE: dict[str, Any] = {
    "lists of texts that must differ": {"oneOf": [{"enum": [f"{i}-{j}" for j in range(180)]} for i in range(100)]},
    "lists of integers that must differ": {"oneOf": [{"enum": [*range(i * 400, i * 400 + 400)]} for i in range(100)]},
    "lists that have nothing in common": {"allOf": [{"enum": list(range(20000))}, {"enum": list(range(20000, 40000))}]},
    "names and patterns": {"properties": {"n" * 100 + str(i): {} for i in range(200)},
                           "patternProperties": {f"^n{{1,{i + 1}}}[0-9]*$": {"type": "string"} for i in range(200)}},
    "long bounds": {"type": "object", "properties": {f"p{i}": NUMBER for i in range(300)}},
    "long bounds by turns": {"anyOf": [{"minimum": 10**29 + i, "maximum": 10**30 + i} for i in range(4000)]},
    "intervals": {"type": "integer", "anyOf": [{"multipleOf": 1, "minimum": i, "maximum": i + 9} for i in range(3000)]},
    "required names": {"properties": {f"a{i}": {} for i in range(12000)}, "required": [f"b{i}" for i in range(12000)]},
    "references that double": {"$defs": {"d0": {"type": "string"}, **{f"d{i}": {"type": "object", "properties": {
        name: {"$ref": f"#/$defs/d{i - 1}"} for name in "ab"}} for i in range(1, 23)}},
        "allOf": [{"$ref": "#/$defs/d22"}, {"$ref": "#/$defs/d22", "minProperties": 0}]},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_are_answered_in_a_second(name: str) -> None:
    params = StructuredOutputsParams(json=LARGE[name])
    assert least_seconds(lambda: compile_anew(params), enough=3) < 3  # one second, and a busy machine


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)*$", "^(.*)*b$", "^([a-z]+)*[0-9]$"])
@pytest.mark.parametrize("place", ["patternProperties", "propertyNames", "pattern"])
def test_no_pattern_of_a_schema_reaches_python_s_expressions(
    place: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of 60 letters and a sign would take a backtracking matcher years."""
    name = "a" * 60 + "!"
    rules = {"patternProperties": {pattern: {}}, "propertyNames": {"pattern": pattern}}
    schema: Any = {"type": "object", "properties": {name: {"type": "string"}}}
    schema |= {"properties": {name: {"enum": [name, "b"], "pattern": pattern}}} if place == "pattern" else {}
    schema |= {place: rules[place]} if place in rules else {}
    compiled: list[object] = []
    compile_of_re = re._compiler.compile  # type: ignore[attr-defined]

    def note(found: Any, *rest: Any) -> Any:
        compiled.append(found)
        return compile_of_re(found, *rest)

    monkeypatch.setattr(re._compiler, "compile", note)  # type: ignore[attr-defined]
    with contextlib.suppress(BadRequestError):
        compile_structured(StructuredOutputsParams(json=schema))
    assert pattern not in compiled


SURROGATES = [{"const": "\ud800"}, {"enum": ["\udfff"]}, {"pattern": "\ud800"}, {"properties": {"\udc00": {}}}]
MALFORMED: list[Any] = [
    {"allOf": [5]}, {"anyOf": [5], "type": "object"}, {"oneOf": [5, 6]}, {"oneOf": [None, "a"]}, {"type": 5},
    {"enum": [1], "type": 5}, {"const": 1, "enum": 5}, {"$defs": {"a": [1]}, "$ref": "#/$defs/a", "type": "string"},
    *({"oneOf": [{"type": "object", name: value}, {"type": "string"}]} for name, value in (
        ("required", 5), ("required", [{}]), ("properties", [1]), ("anyOf", 5), ("allOf", 5), ("enum", 5))),
    {"oneOf": [{"$ref": "#/title"}, {"type": "null"}], "title": "a"},
    *({"allOf": [{name: good}, {name: bad}]} for name, good, bad in (
        ("minimum", 1, "a"), ("properties", {}, [1]), ("enum", [1], 5), ("required", ["a"], 5), ("anyOf", [{}], 5),
        ("exclusiveMinimum", 1, "a"), ("type", "string", 5), ("allOf", [{}], 5))),
    {"propertyNames": {"pattern": "("}}, *SURROGATES, '{"const":NaN}', '{"a', "[", {"const": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(MALFORMED)))
def test_malformed_schemas_are_refused(place: int) -> None:
    assert not check_answer(MALFORMED[place])
