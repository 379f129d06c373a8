# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""What can be written under a schema, and what cannot: the texts themselves, by the automaton."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal
from typing import Any

import pytest

from automata import PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.grammar.pattern import pattern_language
from blink.structured_outputs import StructuredOutputsParams
from cpu_seconds import forget_automata, least_seconds


def automaton_of(schema: Any, **options: Any) -> PlainAutomaton:
    return PlainAutomaton(compile_structured(StructuredOutputsParams(json=schema, **options)).data)


def check(schema: Any, right: list[str], wrong: list[str]) -> None:
    automaton = automaton_of(schema)
    assert [text for text in right if not automaton.accepts(text.encode())] == []
    assert [text for text in wrong if automaton.accepts(text.encode())] == []


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "string"},
            [r'"Stra\u00dfe"', r'"\u65E5\u672c"', r'"\ud83c\uDF89!"', r'"a\/b\\\""', r'"\u0041\t\b"', '"é"'],
            [r'"\u00"', r'"\ud83c"', r'"\udf89"', r'"\ud83cx"', r'"\x41"', r'"\U0041"', '"\n"', r'"\ud83c\u0041"'],
        ),
        (
            {"type": "string", "maxLength": 2},
            [r'"\u00fc\u00df"', r'"\ud83c\udf89x"', r'"\n\""', '"日本"', '""'],
            [r'"\u00fc\u00dfx"', r'"\ud83c\udf89xy"', '"abc"', r'"a\nb"'],
        ),
        ({"enum": ["Köln", "a/b", "Tom & Jerry"]},
         [r'"K\u00f6ln"', r'"K\u00F6ln"', '"Köln"', r'"a\/b"', r'"Tom \u0026 Jerry"'], [r'"K\u00f7ln"', r'"Koln"']),
        ({"type": "object", "properties": {"größe": {"type": "null"}}, "required": ["größe"]},
         [r'{"gr\u00f6\u00dfe":null}', '{"größe": null}'], ['{"grosse":null}', "{}"]),
        ({"type": "string", "pattern": "^[à-ü]+$"}, [r'"\u00e9\u00fC"', '"éü"'], [r'"\u00ff"', r'"\u0065"']),
        ({"type": "string", "pattern": "^\\d{2}/\\d{2}$"}, [r'"12\/31"', '"12/31"'], [r'"12\u002D31"']),
    ],
)  # fmt: skip
def test_every_escape_of_json_can_be_written(schema: Any, right: list[str], wrong: list[str]) -> None:
    check(schema, right, wrong)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, ["98765432109876543210", "-1", "0"], ["01", "1.5", "+1", "1e3"]),
        ({"type": "number"}, ["6.02214076e23", "1E-7", "0.30000000000000004", "-2.50e+05"], ["1.", ".5", "1e", "1e999"]),
        ({"type": "integer", "minimum": 1}, ["4111111111111111", "1"], ["0", "-5"]),
        ({"type": "number", "minimum": -180, "maximum": 180},
         ["2.294694812", "-180.000", "179.999999999", "4.2e-5"], ["180.0000001", "-200", "1.8e3"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.00000007", "7e-8"], ["0", "0.0", "1", "1.0"]),
        ({"type": "number", "minimum": 0}, ["1.5e6", "12345678901234567890"], ["-1e-5", "-0.1"]),
        ({"type": "number", "multipleOf": 0.25}, ["1.75", "1.750", "-0.5", "3"], ["1.8", "0.255"]),
        ({"type": "number", "multipleOf": 0.05, "minimum": 1}, ["19.95", "1", "1.00"], ["0.95", "1.01"]),
        ({"type": "integer", "multipleOf": 15, "minimum": 100}, ["105", "1500"], ["90", "110"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"type": "number", "not": {"minimum": 10, "maximum": 20}}, ["9.99", "20.01"], ["10", "15.5", "20.0"]),
    ],
)  # fmt: skip
def test_numbers_are_as_long_as_they_are(schema: Any, right: list[str], wrong: list[str]) -> None:
    check(schema, right, wrong)


def test_bounds_and_multiples_are_exact() -> None:
    chosen = [Decimal(each) / 40 for each in range(-90, 91, 7)]
    for low, step in itertools.product((Decimal("-1.5"), Decimal(0), Decimal("0.125")), (None, Decimal("0.5"), 3)):
        schema = {"type": "number", "minimum": float(low)} | ({} if step is None else {"multipleOf": float(step)})
        automaton = automaton_of(schema)
        for value in chosen:
            is_right = value >= low and (step is None or value % step == 0)
            assert automaton.accepts(f"{value:f}".encode()) == is_right, (schema, value)


def test_space_is_free_between_tokens_but_ends() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {}}}
    values: list[Any] = [{"a": [1, 2], "b": {"x": [None]}}, {"a": []}, {}]
    for value in values:
        for indent, separators in itertools.product((None, 1, 4, "\t"), ((",", ":"), (", ", ": "), (" , ", " : "))):
            text = json.dumps(value, indent=indent, separators=separators)
            assert automaton_of(schema).accepts(text.encode()), text
            assert automaton_of(schema).accepts(text.replace("\n", "\r\n").encode()), text
    tight = automaton_of(schema, disable_any_whitespace=True)
    assert tight.accepts(b'{"a":[1,2]}') and not tight.accepts(b'{"a": [1]}')
    assert automaton_of(schema).accepts(b'{"a":' + b" " * 80 + b"[]}")
    assert not automaton_of(schema).accepts(b'{"a":' + b" " * 200 + b"[]}")


_KIND = {"kind": {"enum": ["card", "cash", "bank"]}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "uuid", "pattern": "^[0-9a-f-]*$"},
         ['"123e4567-e89b-42d3-a456-426614174000"'], ['"123E4567-e89b-42d3-a456-426614174000"', '"abc"']),
        ({"type": "string", "format": "email", "minLength": 8, "maxLength": 12}, ['"a@b.example"'], ['"a@b.io"', '"abcdefghij"']),
        ({"type": "string", "pattern": "^([A-Z]{2})+$", "minLength": 4, "maxLength": 6}, ['"ABCD"', '"ABCDEF"'], ['"AB"', '"ABC"', '"ABCDEFGH"']),
        ({"allOf": [{"type": "string", "minLength": 1, "maxLength": 4}, {"minLength": 2, "maxLength": 3}]}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
        ({"type": "string", "pattern": "^(?=.*\\d)(?=.*[a-z])\\w{6,8}$"}, ['"abc123"'], ['"abcdef"', '"123456"', '"a1"']),
        ({"enum": ["S", "M", 3, None], "minLength": 1, "type": ["string", "null"]}, ['"S"', "null"], ["3", '"X"']),
        ({"const": "dog", "pattern": "^d", "format": "date"}, [], ['"dog"']),
        ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}], "type": "integer"}, ["9", "10", "-5"], ["15", "7", "0"]),
        ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^x"}]}, ['"ab"', '"xylophone"'], ['"xy"', '"long"']),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": "auto"}]}, ['"a"', '"auto"'], ['"au"', '"autox"']),
        ({"type": "string", "not": {"enum": ["none", "null"]}}, ['"non"', '"nones"'], ['"none"', '"null"']),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2}, ["[3,1]", "[2,3,1]"], ["[1]", "[1,1]", "[3,1,3]"]),
        ({"type": "array", "items": {"enum": list("abcdefghij")}, "uniqueItems": True}, ['["a","c","j"]', "[]"], ['["a","a"]']),
        ({"type": "array", "contains": {"const": 7}, "items": {"type": "integer"}}, ["[1,7,2]", "[7,7]"], ["[1,2]", "[]"]),
        ({"type": "array", "contains": {"minimum": 5}, "items": {"type": "integer"}, "minContains": 2, "maxContains": 3},
         ["[5,1,6]", "[9,9,9]"], ["[5,1]", "[5,6,7,8]"]),
        ({"type": "object", "properties": {**_KIND, "iban": {"type": "string"}}, "required": ["kind"],
          "if": {"properties": {"kind": {"const": "bank"}}}, "then": {"required": ["iban"]}, "else": {"not": {"required": ["iban"]}}},
         ['{"kind":"cash"}', '{"kind":"bank","iban":"DE"}'], ['{"kind":"bank"}', '{"kind":"card","iban":"DE"}']),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "dependentRequired": {"a": ["b"]}},
         ['{"b":1}', '{"a":1,"b":2}', '{"c":1}'], ['{"a":1}', '{"a":1,"c":2}']),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentSchemas": {"b": {"properties": {"a": {"const": 1}}}}},
         ['{"a":2}', '{"a":1,"b":0}'], ['{"a":2,"b":0}']),
        ({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
         ['{"n":1,"x":"y","z":""}', '{"q":"w"}'], ['{"n":"1"}', '{"x":1}', '{"n":1,"n":"x"}']),
        ({"type": "object", "patternProperties": {"^x-": {"type": "integer"}, "^[a-z]+$": {"type": "null"}}, "additionalProperties": False},
         ['{"x-a":1}', '{"ab":null,"x-":2}'], ['{"x-a":null}', '{"Ab":1}']),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}, "d": {}}, "minProperties": 2, "maxProperties": 3},
         ['{"a":1,"d":2}', '{"b":1,"c":2,"d":3}'], ['{"a":1}', "{}", '{"a":1,"b":2,"c":3,"d":4}']),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}],
          "type": "object", "unevaluatedProperties": False}, ['{"a":1,"b":2}'], ['{"a":1,"c":2}']),
        ({"$ref": "#t", "$defs": {"t": {"$anchor": "t", "type": "array", "items": {"$ref": "#t"}, "maxItems": 2}}},
         ["[]", "[[],[[]]]"], ["[1]", "[[],[],[]]"]),
        ({"type": "object", "required": ["a", "z"], "properties": {"z": {"type": "null"}}}, ['{"z":null,"a":5}'], ['{"z":null}']),
        ({"properties": {"a": {"type": "null"}}, "x-order": 1, "extends": "Base"}, ['{"a":null}'], ["5"]),
        ({"type": ["object", "null"], "properties": {}, "required": None}, ["null", "{}"], ["5"]),
    ],
)  # fmt: skip
def test_keywords_hold_together(schema: Any, right: list[str], wrong: list[str]) -> None:
    if not right:
        with pytest.raises(BadRequestError, match="no finite text"):
            automaton_of(schema)
    else:
        check(schema, right, wrong)


@pytest.mark.parametrize(
    "bounds", [{}, {"minProperties": 1}, {"minProperties": 1, "required": ["b"]}, {"required": ["a"]}]
)
@pytest.mark.parametrize("is_open", [True, False])
def test_an_empty_object_is_written_where_it_may_be(bounds: dict[str, Any], is_open: bool) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": is_open, **bounds}
    assert automaton_of(schema).accepts(b"{}") == (not bounds)
    assert automaton_of(schema).accepts(b'{"a":0,"b":0}')


@pytest.mark.parametrize("least", [0, 2, 5, 10])
@pytest.mark.parametrize("most", [0, 2, 5, 10])
def test_a_pattern_s_counts_and_lengths_are_both_kept(least: int, most: int) -> None:
    schema = {"type": "string", "pattern": "^[a-z]{2,10}$", "minLength": least, "maxLength": most}
    if max(least, 2) > most:
        with pytest.raises(BadRequestError, match="no finite text"):
            automaton_of(schema)
        return
    automaton = automaton_of(schema)
    for length in range(13):
        assert automaton.accepts(f'"{"x" * length}"'.encode()) == (max(least, 2) <= length <= most), length


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"t{i}": {"type": "string", "maxLength": 180} for i in range(110)}},
        {"type": "object", "properties": {f"t{i}": {"type": "string", "format": "date-time"} for i in range(140)}},
        {"type": "object", "properties": {f"t{i}": {"type": "string", "minLength": 1, "maxLength": 600} for i in range(70)}},
        {"type": "object", "properties": {f"t{i}": {"type": "string", "format": "email"} for i in range(55)}},
        {"type": "object", "properties": {f"t{i}": {"type": "string", "format": "uri", "maxLength": 2048} for i in range(30)}},
        {"type": "object", "properties": {f"t{i}": {"type": "string", "maxLength": 100 + i} for i in range(60)}},
    ],
)  # fmt: skip
def test_many_usual_fields_do_not_add_up(schema: Any) -> None:
    assert least_seconds(lambda: (forget_automata(), automaton_of(schema)), enough=2) < 2
    automaton = automaton_of(schema)
    assert automaton.accepts(b"{}") and automaton.num_states < 16_000


def test_a_chain_of_rules_takes_no_stack() -> None:
    rules = [f'r{i} ::= "{chr(97 + i % 26)}" r{i + 1} | "end"' for i in range(40)]
    grammar = "\n".join(["root ::= r0", *rules, 'r40 ::= "!" r40 | "."'])
    automaton = PlainAutomaton(compile_structured(StructuredOutputsParams(grammar=grammar)).data)
    letters = "".join(chr(97 + i % 26) for i in range(40))
    assert automaton.accepts(f"{letters}{'!' * 500}.".encode()) and automaton.accepts(b"abend")
    assert not automaton.accepts(letters.encode())


@pytest.mark.parametrize(
    "pattern",
    ["(a|b$)*c?", "^a*$|b", "x(?=y)", "^(?!ab).*$", "(a$|b){1,3}", "a(?!b)", "(?:^|-)a", "^-?a(?:$|-)", "^(?:a|b)+$",
     "(?=a)(?=.*b)a.*", "", "^$", "a{2}$", r"\w-\W?"],
)  # fmt: skip
def test_patterns_match_what_python_s_do(pattern: str) -> None:
    language = pattern_language(pattern)
    for text in map("".join, itertools.chain.from_iterable(itertools.product("abxy-", repeat=n) for n in range(5))):
        assert language.matches(text) == (re.search(pattern, text, re.ASCII) is not None), text


def test_options_are_apart_only_if_all_their_values_are() -> None:
    """Texts pass `minimum` and numbers pass `minLength`: each k that one option speaks of, the other allows, too."""
    kinds = [{"anyOf": [{"minLength": 1}]}, {"anyOf": [{"minimum": 0}]}]
    options = [{"type": "object", "properties": {"k": kind}, "required": ["k"]} for kind in kinds]
    with pytest.raises(BadRequestError, match="no finite text"):
        automaton_of({"oneOf": options})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "not": {"format": "hostname"}}, ['"a b"', '"10.0.0.1"'], ['"a.b"', '"xn--bcher-kva"']),
        ({"type": "string", "not": {"not": {"format": "time"}}}, ['"08:17:00Z"'], ['"08:17"', '"08:17:60+07:43"']),
        ({"oneOf": [{"format": "ipv4"}, {"format": "hostname"}], "type": "string"},
         ['"10.0.0.1"', '"a.b"'], ['"xn--bcher-kva"', '"a b"']),
        ({"if": {"format": "duration"}, "then": {"maxLength": 3}, "type": "string"},
         ['"P1D"', '"other"'], ['"P10D"', '"p10d"', '"p1d"']),
        ({"type": "string", "not": {"pattern": r"^\d+$"}}, ['"1a"', '""'], ['"12"', '"٣"', r'"7\n"', r'"\u0663"']),
        ({"type": "string", "not": {"pattern": r"\s"}}, ['"ab"'], ['"a b"', r'"\u001c"', r'"\u00a0"']),
        ({"type": "string", "pattern": r"^\S$"}, ['"a"'], [r'"\u001c"', r'"\u00a0"', '" "']),
        ({"type": "string", "pattern": r"^(?!\w).$"}, ['"-"'], ['"ä"', '"a"', r'"\u0085"', r'"\r"']),
        ({"type": "string", "pattern": r"^[^\D]$"}, ['"4"'], ['"٣"', '"a"']),
        ({"type": "string", "not": {"pattern": r"[^\w-]"}, "minLength": 1}, ['"a-b"'], ['"ä"', '"a b"']),
    ],
)  # fmt: skip
def test_what_validators_judge_differently_is_neither_meant_nor_excluded(
    schema: Any, right: list[str], wrong: list[str]
) -> None:
    check(schema, right, wrong)
