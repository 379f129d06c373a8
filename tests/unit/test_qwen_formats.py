# SPDX-License-Identifier: Apache-2.0
"""Chats with Qwen3-Next, Qwen3-VL, Qwen 3.5 and what follows it: calls and reasoning by the chat template alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automata import PlainAutomaton
from blink.api.serving.message_constraint import constrain_message
from blink.grammar.compiler import compile_structured
from blink.text.message.formats import find_call_format
from blink.text.message.reasoning_formats import find_reasoning_format
from chat_formats import TALK, USER, cuts_of, meaning_of, parse, read_chat, read_form, render
from qwen_templates import MODELS, REPLIES, THOUGHT, Qwen, Reply

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
CASES = [
    pytest.param(MODELS[name], reply, id=f"{name}-{place}")
    for name, model in MODELS.items()
    for place, reply in enumerate(REPLIES[model.calls])
]
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
each_case = pytest.mark.parametrize(("model", "reply"), CASES)


@each_model
def test_auto_knows_the_model_by_its_template(model: Qwen) -> None:
    assert find_call_format(model.template) == model.calls
    assert (find_reasoning_format(model.template) is None) is (model.opens == "never")


@each_case
def test_replies_are_read_at_every_cut(model: Qwen, reply: Reply) -> None:
    """Where the template opens the reasoning, the reply begins within it and has the closing tag alone."""
    thinks = model.opens != "never"
    _, form = read_form(model.template)
    text = f"{THOUGHT}\n</think>\n\n{reply.text}" if thinks else reply.text
    reasoning, space = (f"{THOUGHT}\n", "\n\n") if thinks else ("", "")
    expected = (reasoning, reply.content and space + reply.content, list(reply.calls))
    for pieces in cuts_of(text):
        assert meaning_of(parse(form, pieces)) == expected


@each_case
def test_a_model_that_is_not_to_think_answers_at_once(model: Qwen, reply: Reply) -> None:
    _, form = read_form(model.template, **OFF)
    # A template without the switch opens the reasoning all the same.
    before, space = ("</think>\n\n", "\n\n") if model.opens == "always" else ("", "")
    expected = ("", reply.content and space + reply.content, list(reply.calls))
    assert meaning_of(parse(form, list(before + reply.text))) == expected


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.6", "Qwen3.8"])
def test_a_call_in_open_reasoning_ends_it_where_the_model_may_call(name: str) -> None:
    reply = REPLIES["qwen3_coder"][1]
    text = f"Now the room.\n\n{reply.text}"
    _, form = read_form(MODELS[name].template)
    for pieces in cuts_of(text):
        assert meaning_of(parse(form, pieces)) == ("Now the room.\n\n", "", list(reply.calls))
    for fields in ({"tools": None}, {"tool_choice": "required"}):
        _, form = read_form(MODELS[name].template, **fields)
        assert meaning_of(parse(form, [text])) == (text, "", [])


@each_model
@pytest.mark.parametrize("thinking", [True, False])
def test_forced_calls_have_the_models_own_form_and_follow_its_reasoning(model: Qwen, thinking: bool) -> None:
    parsed, form = read_form(model.template, tool_choice="required", **({} if thinking else OFF))
    params = constrain_message(parsed.params, parsed.tool_use, form).structured_outputs
    assert params is not None
    automaton = PlainAutomaton(compile_structured(params).data)
    is_inside = model.opens == "always" or (model.opens == "switch" and thinking)
    before = f"{THOUGHT}\n</think>\n\n" if is_inside else ""
    # Strings are quoted, and values between tags are JSON, as these models write them.
    call = REPLIES[model.calls][0].text.removeprefix("I will book it.\n\n").replace("False", "false")
    text = f"{before}{call}"
    assert automaton.accepts(text.encode())
    assert meaning_of(parse(form, list(text)))[2] == list(REPLIES[model.calls][0].calls)
    assert not automaton.accepts(f"{before}I will book it.".encode())
    if is_inside:
        assert not automaton.accepts(f"{THOUGHT}\n</think>\n\nNo.".encode())


@each_model
@pytest.mark.parametrize("thinking", [True, False])
def test_a_form_of_the_answer_holds_behind_reasoning(model: Qwen, thinking: bool) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    switch = {} if thinking else OFF
    parsed = read_chat(model.template, tools=None, response_format=form, **switch)
    structured = parsed.params.structured_outputs
    if parsed.reply.message is not None:
        structured = constrain_message(parsed.params, None, parsed.reply.message).structured_outputs
    assert structured is not None
    automaton = PlainAutomaton(compile_structured(structured).data)
    is_inside = model.opens == "always" or (model.opens == "switch" and thinking)
    before = f"{THOUGHT}\n</think>\n\n".encode() if is_inside else b""
    assert automaton.accepts(before + b'{"ok": true}')
    assert not automaton.accepts(before + b"Yes.")
    assert is_inside or not automaton.accepts(b"Yes.</think>")


@each_model
@pytest.mark.parametrize("preserve", [None, True, False])
def test_earlier_reasoning_is_shown_as_the_template_decides(model: Qwen, preserve: bool | None) -> None:
    switch = {} if preserve is None else {"chat_template_kwargs": {"preserve_thinking": preserve}}
    text = render(model.template, TALK, **switch)
    thinks = model.opens != "never"
    keeps = {"turn": False, "asked": preserve is True, "all": preserve is not False}[model.keeps]
    assert ("Recent thought." in text) is thinks
    assert ("Earlier thought." in text) is (thinks and keeps)


@each_model
def test_earlier_calls_are_shown_as_the_model_writes_them(model: Qwen) -> None:
    text = render(model.template, TALK)
    form = replace(read_form(model.template)[1], reasoning=None)
    written = text[text.rindex("<tool_call>") : text.rindex("</tool_call>") + len("</tool_call>")]
    assert meaning_of(parse(form, [written])) == ("", "", [("book_room", {"hotel": "7", "nights": 3})])
    assert "<tool_response>\nBooked.\n</tool_response>" in text


@each_model
def test_instructions_go_where_the_template_takes_them(model: Qwen) -> None:
    """It refuses those behind the first message, and the role of developers."""
    talk = [USER, {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    text = render(model.template, talk)
    assert text.index("Be brief.") < text.index("<|im_start|>user\nA room.")
