# SPDX-License-Identifier: Apache-2.0
"""Patterns, choices and tagged texts: the automaton takes what Python's re does."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from automata import PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.structured_outputs import StructuralTag, StructuredOutputsParams, Tag
from cpu_seconds import forget_automata, least_seconds

PATTERNS = [
    "abc", "a|b|", "(ab)*c?", "[a-c]{2,3}", "[^a]b", "a.c", r"\d+\.\d*", r"[\w-]+", r"a{0,2}b{2}c{1,}", "(a|ab)(c|bcd)",
    "x*?y+?", "(?:a(?P<name>b))+", r"\x41\u00e9", r"[\]a]", r"\\\/\.", "é+", "a{,3}", "a{b", "[a\\-z]",
    "(a*)*b", "(a|a)*", "[a-c]{0,130}c", "", "^a$", "^(a|b)$", "^a|^b$", r"\s\S",
]  # fmt: skip


def automaton_of(**params: Any) -> PlainAutomaton:
    return PlainAutomaton(compile_structured(StructuredOutputsParams(**params)).data)


def random_texts(pattern: str, count: int = 300) -> list[str]:
    chance = random.Random(pattern)
    letters = [*"abcdxyzAB019_.-]\\/{}, \n", "é", "日", *pattern]
    return ["".join(chance.choice(letters) for _ in range(chance.randrange(7))) for _ in range(count)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_takes_what_re_does(pattern: str) -> None:
    automaton, compiled = automaton_of(regex=pattern), re.compile(pattern, re.ASCII)
    chance = random.Random(2)
    texts = [*random_texts(pattern), "abc" * 10, "c" * 131, "c" * 132]
    texts += [text.decode() for _ in range(20) if (text := automaton.draw(chance, 8)) is not None]
    for text in texts:
        assert automaton.accepts(text.encode()) == (compiled.fullmatch(text) is not None), text


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[a", "*a", "a{3,1}", r"\1", r"\bword", r"\p{Greek}", "(?!a)*", "[z-a]", r"\uD800", "(?i)a", "(?<=a)b"],
)
def test_what_is_no_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(BadRequestError, match="pattern"):
        automaton_of(regex=pattern)


def test_a_choice_takes_its_texts_alone() -> None:
    automaton = automaton_of(choice=["yes", "no", "nobody", "né"])
    assert all(automaton.accepts(text.encode()) for text in ("yes", "no", "nobody", "né"))
    assert not any(automaton.accepts(text) for text in (b"", b"y", b"nob", b"n\xc3", b"yes "))


EXPRESSION = r"""
root ::= sum ("\n")?          # a comment
sum  ::= item ([+-] item)*
item ::= [0-9]{1,3} | "(" sum ")" | "\"" [^"\\\n]* "\""
"""


JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""  # as llama.cpp has it


def test_a_grammar_of_rules_that_may_be_empty_or_begin_alike_is_written_out() -> None:
    automaton = automaton_of(grammar=JSON_GRAMMAR)
    assert automaton.accepts(b'{"a": [1, {"b":\n  null}], "c\\u00e9": -0.5e3}')
    assert not automaton.accepts(b'{"a": [1, }')
    assert automaton_of(grammar='root ::= pair | "a"\npair ::= "a" "b"').accepts(b"ab")


@pytest.mark.parametrize("text", ["1", "12+3-(4+(5))\n", '"a é"+1', "(((7)))"])
def test_a_grammar_takes_its_texts(text: str) -> None:
    assert automaton_of(grammar=EXPRESSION).accepts(text.encode())


@pytest.mark.parametrize("text", ["", "1+", "1234", "(1", '"a', "1\n\n", "((1)"])
def test_a_grammar_takes_no_others(text: str) -> None:
    assert not automaton_of(grammar=EXPRESSION).accepts(text.encode())


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= missing", "'missing' is missing"),
        ('start ::= "a"', "'root' is missing"),
        ('root ::= "a" root', "no finite text"),
        ('root ::= root "a" | "b"', "begin alike"),
        ('root ::= "a" root "a" | "a"', "begin alike"),
        ("root ::= (", "not closed"),
        ("root = 1", "not understood"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        automaton_of(grammar=grammar)


CALL = Tag("<call>", {"type": "object", "properties": {"name": {"const": "f"}}, "required": ["name"]}, "</call>")


@pytest.mark.parametrize(
    ("text", "auto", "required", "once"),
    [
        (b"", True, False, False),
        (b"free < <cal text", True, False, False),
        (b'<call>{"name":"f"}</call>', True, True, True),
        (b'so: <<call>{"name": "f"}</call> done', True, False, False),
        (b'<call>{"name":"f"}</call><call>{"name":"f"}</call>', True, True, False),
        (b"<call>", False, False, False),
        (b'<call>{"name":"g"}</call>', False, False, False),
        (b'<call>{"name":"f"}', False, False, False),
        (b'\xff<call>{"name":"f"}</call>', True, True, True),
        (b"\xff<other>", False, False, False),
    ],
)
def test_tagged_texts(text: bytes, auto: bool, required: bool, once: bool) -> None:
    automata = [
        automaton_of(structural_tag=StructuralTag(tags=[CALL], trigger="<call>")),
        automaton_of(structural_tag=StructuralTag(tags=[CALL])),
        automaton_of(structural_tag=StructuralTag(tags=[CALL], max_tags=1)),
    ]
    assert [automaton.accepts(text) for automaton in automata] == [auto, required, once]


def test_tagged_lists_have_prefixes_and_separators() -> None:
    tags = [Tag("", schema, "") for schema in ({"const": 1}, {"const": 2})]
    automaton = automaton_of(structural_tag=StructuralTag(tags=tags, prefix="[", separator=", ", suffix="]"))
    assert all(automaton.accepts(text) for text in (b"[1]", b"[2, 1, 1]"))
    assert not any(automaton.accepts(text) for text in (b"[]", b"[1, ]", b"1", b"[1,2]"))


HOSTILE = {
    "states without end": {"regex": "(.*a.{20}){3}"},
    "alternations": {"regex": "|".join(f"{'(a|b)*' * 40}{index}" for index in range(40))},
    "counts": {"regex": "((a{0,1000}){0,1000}b{0,1000}){0,1000}c"},
    "nested counts": {"regex": "(" * 30 + "a" + "{1,9})" * 30},
    "nested groups": {"regex": "(" * 5000 + ")" * 5000},
    "references": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 9, "items": False}
                      for i in range(30)} | {"d30": {"type": "null"}},
        }
    },
    "deep schema": {"json": '{"properties":{"a":' * 3000 + "{}" + "}}" * 3000},
    "long enum": {"json": {"enum": ["x" * 60 + str(index) for index in range(4000)]}},
    "wide union": {"json": {"oneOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]}
                                      for i in range(900)]}},
    "products": {"json": {"allOf": [{"anyOf": [{"type": "string", "minLength": i + 10 * n} for i in range(9)]}
                                    for n in range(12)]}},
    "self": {"json": {"$ref": "#"}},
    "merged self": {"json": {"allOf": [{"$ref": "#"}, {"type": "object"}]}},
    "long text": {"json": {"type": "string", "minLength": 10**9}},
    "long array": {"json": {"type": "array", "minItems": 4000, "items": {"type": "string", "maxLength": 4000}}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_soon(name: str) -> None:
    def compile_anew() -> None:
        forget_automata()
        try:
            automaton_of(**HOSTILE[name])
        except BadRequestError as error:
            assert error.param == "structured_outputs"

    assert least_seconds(compile_anew, enough=3) < 3


@pytest.mark.parametrize("params", [{}, {"regex": "a", "json": {}}, {"choice": []}])
def test_exactly_one_form_is_asked_for(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match=r"structured_outputs|choice"):
        StructuredOutputsParams(**params)
