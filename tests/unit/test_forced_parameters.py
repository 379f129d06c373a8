# SPDX-License-Identifier: Apache-2.0
"""Forced calls whose arguments are no JSON object: in each model's own form, and read back as they were meant."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from automata import PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.grammar.literal import SPECIAL_MARK
from blink.structured_outputs import StructuredOutputsParams
from blink.text.message.formats import CALL_FORMATS
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, merge
from blink.text.message.tool_use import Function, ToolUse, constrain, schemas_of

NAMES = [name for name, form in CALL_FORMATS.items() if form.parameters is not None]
TAGGED = [name for name in NAMES if CALL_FORMATS[name].tags is not None]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "short": {"type": "string", "maxLength": 3},
        "pages": {"type": "integer", "minimum": 1},
        "used": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "code": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "kind": {"enum": ["novel", "a 'b'", 3, None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "author": {"$ref": "#/$defs/person"},
        "extra": {},
    },
    "required": ["title"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
USE = ToolUse((Function("book", SCHEMA),), "required")


def automaton_of(name: str, use: ToolUse = USE) -> PlainAutomaton:
    tag = constrain(use, CALL_FORMATS[name])
    assert tag is not None
    return PlainAutomaton(compile_structured(StructuredOutputsParams(structural_tag=tag)).data)


def write(name: str, arguments: dict[str, Any], function: str = "book") -> str:
    form = CALL_FORMATS[name]
    written = form.parameters
    assert written is not None

    def value(given: Any) -> str:
        if isinstance(given, str) and written.text is not None:
            return written.text[0] + given + written.text[1]
        if written.is_python and (given is None or isinstance(given, bool)):
            return str(given)
        return written.before_json + json.dumps(given)

    members = [written.begin % key + value(given) + written.end.replace("%s", key) for key, given in arguments.items()]
    call = form.begin % function + written.separator.join(members) + form.end
    return form.prefix + call + form.suffix


def read(name: str, text: str, use: ToolUse = USE) -> Any:
    form = MessageForm(calls=CALL_FORMATS[name], names=use.names, schemas=schemas_of(use))
    parts = (parser := MessageParser(form)).push(text)
    found = [part.text for part in merge(parts + parser.finish()) if isinstance(part, CallArguments)]
    return [json.loads(each) for each in found]


@pytest.fixture(scope="module", params=NAMES)
def forced(request: pytest.FixtureRequest) -> tuple[str, PlainAutomaton]:
    return request.param, automaton_of(request.param)


@pytest.mark.parametrize(
    "arguments",
    [
        {"title": 'War & "Peace" <1>\n\n\tindented \\n é\U0001f600'},
        {"title": "", "pages": 12, "used": True},
        {"title": "12", "short": "abc", "note": None, "code": 7, "kind": 3},
        {"title": "null", "used": False, "note": "nothing", "code": "7b", "kind": "a 'b'"},
        {"title": "\n", "note": "", "kind": None, "tags": ["a", "</b>"], "author": {"name": "x"}},
        {"title": "a", "extra": [1, {"b": None}]},
        {"title": "a", "extra": "free text"},
    ],
)
def test_arguments_are_written_and_read_back(forced: tuple[str, PlainAutomaton], arguments: dict[str, Any]) -> None:
    name, automaton = forced
    text = write(name, arguments)
    assert automaton.accepts(text.encode())
    assert read(name, text) == [arguments]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"pages": 1, "title": "in another order"},
        {"title": "a", "short": "abcd"},
        {"title": "a", "pages": 0},
        {"title": "a", "used": None},
        {"title": "a", "kind": "poem"},
        {"title": "a", "author": {}},
        {"title": "a", "other": 1},
    ],
)
def test_what_the_schema_does_not_allow_is_not_written(
    forced: tuple[str, PlainAutomaton], arguments: dict[str, Any]
) -> None:
    name, automaton = forced
    assert not automaton.accepts(write(name, arguments).encode())


@pytest.mark.parametrize("name", TAGGED)
def test_no_text_holds_what_would_end_it(name: str) -> None:
    written = CALL_FORMATS[name].parameters
    assert written is not None
    automaton = automaton_of(name)
    for stop in written.stops:
        assert not automaton.accepts(write(name, {"title": f"a{stop}b"}).encode())
        assert automaton.accepts(write(name, {"title": f"a{stop[:-1]}b"}).encode())


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": ["string", "integer"], "minimum": 5}, "3"),
        ({"type": ["string", "object"], "required": ["a"]}, "{}"),
        ({"type": ["string", "boolean"], "enum": ["a", False]}, "true"),
    ],
)
def test_a_text_is_no_value_of_another_type_that_the_schema_forbids(name: str, schema: Any, text: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    automaton = automaton_of(name, ToolUse((Function("f", parameters),), "required"))
    assert not automaton.accepts(write(name, {"x": text}, "f").encode())


@pytest.mark.parametrize("num_texts", [6, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_random_forced_calls_are_valid(name: str, num_texts: int) -> None:
    properties: dict[str, Any] = {
        "kind": {"enum": ["a", 'b "c"', 1, True, None]},
        "pages": {"type": ["integer", "null"]},
        "used": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": ["x", False]}, "maxItems": 2},
    }
    schema = {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}
    use = ToolUse((Function("f", schema), Function("g")), "required")
    automaton, chance, most = automaton_of(name, use), random.Random(2), 0
    for text in filter(None, (automaton.draw(chance, 300) for _ in range(num_texts))):
        calls = read(name, text.replace(SPECIAL_MARK, b"").decode(), use)
        most = max(most, len(calls))
        for arguments in calls:
            jsonschema.validate(arguments, {"anyOf": [schema, {"maxProperties": 0}]})
    assert most > 0


@pytest.mark.parametrize("name", TAGGED)
def test_markers_may_be_special_tokens(name: str) -> None:
    form = CALL_FORMATS[name]
    text = write(name, {"title": "a"}).encode()
    for marker in (*form.opens, *form.closes):
        text = text.replace(marker.encode(), SPECIAL_MARK + marker.encode())
    assert automaton_of(name).accepts(text)


def test_a_special_token_may_stand_inside_of_a_marker() -> None:
    strict = ToolUse((Function("book", SCHEMA, strict=True),))
    text = f"So: {write('deepseek_v32', {'title': 'a', 'pages': 1})}".encode()
    marked = text.replace("｜DSML｜".encode(), SPECIAL_MARK + "｜DSML｜".encode())
    for use, shown in ((strict, b"So: "), (USE, b"")):
        automaton = automaton_of("deepseek_v32", use)
        for each in (text, marked):
            assert automaton.accepts(shown + each.removeprefix(b"So: "))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_calls_of_the_models_choice_keep_their_schema(name: str) -> None:
    automaton = automaton_of(name, ToolUse((Function("book", SCHEMA),)))
    assert automaton.accepts(b"Free text < here") and automaton.accepts(b"")
    for text, is_kept in ((write(name, {"title": "a"}), True), (write(name, {"pages": 1}), False)):
        assert automaton.accepts(f"Well. {text}".encode()) is is_kept


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4"])
def test_any_object_may_be_written(name: str) -> None:
    use = ToolUse((Function("set", {"type": "object"}),), "required")
    automaton = automaton_of(name, use)
    for arguments in ({}, {"a": 1}, {"a_b": "c", "d": [True]}):
        text = write(name, arguments, "set")
        assert automaton.accepts(text.encode()) and read(name, text, use) == [arguments]


@pytest.mark.parametrize("name", ["glm47", "step3"])
def test_the_number_of_members_is_kept(name: str) -> None:
    for parameters, most in (({"maxProperties": 0}, 0), ({"maxProperties": 1, "properties": {"a": {}, "b": {}}}, 1)):
        use = ToolUse((Function("f", {"type": "object", **parameters}),), "required")
        automaton = automaton_of(name, use)
        for size in range(3):
            text = write(name, dict.fromkeys("ab"[:size], 1), "f")
            assert automaton.accepts(text.encode()) is (size <= most)


@pytest.mark.parametrize(("name", "key"), [("qwen3_coder", "a>b"), ("pythonic", "a b"), ("gemma4", "a:b")])
def test_a_name_that_cannot_be_written_is_refused(name: str, key: str) -> None:
    with pytest.raises(BadRequestError, match="cannot be written"):
        automaton_of(name, ToolUse((Function("f", {"type": "object", "properties": {key: {}}}),), "required"))
