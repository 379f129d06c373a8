# SPDX-License-Identifier: Apache-2.0
"""What the output of a request with tools is constrained to: the parser reads calls in all that it allows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, Literal

import pytest

from automata import PlainAutomaton
from blink.grammar.compiler import compile_structured
from blink.grammar.literal import SPECIAL_MARK, inner_places
from blink.structured_outputs import StructuredOutputsParams
from blink.text.message.formats import CALL_FORMATS
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, merge
from blink.text.message.tool_use import Function, ToolUse, constrain, schemas_of

UNITS = ["celsius", 'a "quoted" {one}']
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": UNITS}, "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["unit"],
    "additionalProperties": False,
}
FUNCTIONS = (Function("temperature", SCHEMA, strict=True), Function("now"))
FEW_TEXTS, MANY_TEXTS = 12, 40
JSON_CALLS = [name for name, form in CALL_FORMATS.items() if form.trigger and form.parameters is None]
TAGGED = [name for name, form in CALL_FORMATS.items() if not form.uses_harmony]  # the other: test_harmony.py


def automaton_of(name: str, use: ToolUse) -> PlainAutomaton:
    tag = constrain(use, CALL_FORMATS[name])
    assert tag is not None
    return PlainAutomaton(compile_structured(StructuredOutputsParams(structural_tag=tag)).data)


def calls_of(name: str, text: bytes) -> tuple[list[tuple[str, Any]], str]:
    """The calls in a text with their arguments, and its content."""
    names = frozenset(each.name for each in FUNCTIONS)
    form = MessageForm(calls=CALL_FORMATS[name], names=names, schemas=schemas_of(ToolUse(FUNCTIONS)))
    parser = MessageParser(form)
    parts = merge(parser.push(text.decode(errors="replace")) + parser.finish())
    names = [part.name for part in parts if isinstance(part, CallOpened)]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    return list(zip(names, arguments, strict=True)), "".join(part.text for part in parts if isinstance(part, Content))


def check(name: str, arguments: Any) -> None:
    assert isinstance(arguments, dict)
    if name == "temperature":
        assert arguments["unit"] in UNITS and set(arguments) <= {"unit", "days"}
        assert all(isinstance(day, int) for day in arguments.get("days", []))
    else:
        assert (name, arguments) == ("now", {})


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("choice", "parallel", "num_texts"),
    [
        ("required", True, FEW_TEXTS),
        ("named", False, FEW_TEXTS),
        *(
            pytest.param(choice, parallel, MANY_TEXTS, marks=pytest.mark.long)
            for choice in ("required", "named")
            for parallel in (True, False)
        ),
    ],
)
def test_forced_outputs_are_calls_and_nothing_else(
    name: str, choice: Literal["required", "named"], parallel: bool, num_texts: int
) -> None:
    functions = FUNCTIONS if choice == "required" else FUNCTIONS[:1]
    automaton, chance, most = automaton_of(name, ToolUse(functions, choice, parallel)), random.Random(1), 0
    assert not automaton.accepts(b"")
    for text in filter(None, (automaton.draw(chance, 500) for _ in range(num_texts))):
        calls, content = calls_of(name, text.replace(SPECIAL_MARK, b""))
        assert calls and not content
        most = max(most, len(calls))
        for call, arguments in calls:
            check(call, arguments)
    assert (most > 1) is (parallel and choice == "required")


@pytest.mark.parametrize("name", JSON_CALLS)
def test_calls_of_the_models_choice_keep_their_schema(name: str) -> None:
    form = CALL_FORMATS[name]
    automaton = automaton_of(name, ToolUse(FUNCTIONS))
    call = form.prefix + form.begin % "temperature" + "%s" + form.end + form.suffix
    assert automaton.accepts(b"") and automaton.accepts(b"Plain text, and <too")
    assert automaton.accepts((call % '{"unit":"celsius"}').encode())
    assert not automaton.accepts((call % '{"unit":"kelvin"}').encode())
    assert not automaton.accepts((call % "{}").replace("temperature", "other").encode())
    if not form.is_bare:
        assert automaton.accepts(("Let me see. " + call % '{"unit":"celsius", "days":[1]}').encode())
    once = automaton_of(name, replace(ToolUse(FUNCTIONS), parallel=False))
    twice = call % '{"unit":"celsius"}' + "\n" + call % '{"unit":"celsius"}'
    assert not once.accepts(twice.encode()) and automaton.accepts(twice.encode())


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name in JSON_CALLS for place in inner_places(CALL_FORMATS[name].trigger)]
)
def test_a_special_token_may_stand_within_what_a_call_begins_with(name: str, place: int) -> None:
    form = CALL_FORMATS[name]
    automaton, trigger = automaton_of(name, ToolUse(FUNCTIONS)), form.trigger.encode()
    marked = trigger[:place] + SPECIAL_MARK + trigger[place:]

    def call(arguments: str) -> bytes:
        text = form.prefix + form.begin % "temperature" + arguments + form.end + form.suffix
        return text.encode().replace(trigger, marked, 1)

    assert marked in call("{}")
    assert automaton.accepts(call('{"unit":"celsius"}'))
    assert not automaton.accepts(call('{"unit":"kelvin"}'))


@pytest.mark.parametrize(
    ("start", "text", "is_accepted"),
    [
        ("", "Hm.</think>\n\n[1]", True),
        ("", "Hm.</think>[1]", True),
        ("", "Hm.</think>\n\nText", False),
        ("", "Hm", True),  # the end of a text that is cut while it reasons
        ("<think>", "<think>Hm.</think>\n\n[1]", True),
        ("<think>", "[1]", True),
        ("<think>", "Hm.</think>\n\n[1]", False),
    ],
)
def test_a_form_holds_behind_reasoning(start: str, text: str, is_accepted: bool) -> None:
    form = {"type": "array", "items": {"type": "integer"}}
    params = StructuredOutputsParams(json=form, reasoning_start=start, reasoning_end="</think>")
    assert PlainAutomaton(compile_structured(params).data).accepts(text.encode()) is is_accepted


@pytest.mark.parametrize("name", ["hermes", "mistral", "phi4_mini_json"])
def test_an_answer_in_json_may_be_calls_instead(name: str) -> None:
    form = CALL_FORMATS[name]
    calls = constrain(ToolUse(FUNCTIONS, "required"), form)
    params = StructuredOutputsParams(json=SCHEMA, calls=calls)
    automaton = PlainAutomaton(compile_structured(params).data)
    call = form.prefix + form.begin % "temperature" + "%s" + form.end + form.suffix
    assert automaton.accepts(b'{"unit":"celsius"}')
    assert automaton.accepts((call % '{"unit":"celsius"}').encode())
    for text in ('{"unit":"kelvin"}', call % '{"unit":"kelvin"}', 'Text {"unit":"celsius"}', ""):
        assert not automaton.accepts(text.encode())


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("name", ["hermes", "granite"])
def test_a_function_without_parameters_takes_an_empty_object(name: str, choice: Any, parameters: Any) -> None:
    form = CALL_FORMATS[name]
    automaton = automaton_of(name, ToolUse((Function("now", parameters, strict=True),), choice))
    call = form.prefix + form.begin % "now" + "%s" + form.end + form.suffix
    assert automaton.accepts((call % "{}").encode())
    assert not automaton.accepts((call % '{"zone":"UTC"}').encode())


def test_a_function_of_any_object_takes_any() -> None:
    automaton = automaton_of("hermes", ToolUse((Function("set", {"type": "object"}),), "required"))
    assert automaton.accepts(b'<tool_call>\n{"name": "set", "arguments": {"a":1}}\n</tool_call>')
