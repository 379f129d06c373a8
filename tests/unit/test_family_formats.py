# SPDX-License-Identifier: Apache-2.0
"""Chats with families from Gemma 4 to Ernie, and with GLM, MiniMax, DeepSeek and Kimi, by their templates alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automata import PlainAutomaton
from blink.api.serving.message_constraint import constrain_message
from blink.grammar.compiler import compile_structured
from blink.text.message.formats import find_call_format
from blink.text.message.reasoning_formats import REASONING_FORMATS, find_reasoning_format
from chat_formats import TALK, TOOLS, USER, cuts_of, meaning_of, parse, read_chat, read_form, render
from family_templates import MODELS as SMALL_FAMILIES
from family_templates import Chat
from qwen_templates import THOUGHT, Reply
from routed_templates import MODELS as ROUTED_FAMILIES

MODELS = {**SMALL_FAMILIES, **ROUTED_FAMILIES}

CASES = [
    pytest.param(model, reply, id=f"{name}-{place}")
    for name, model in MODELS.items()
    for place, reply in enumerate(model.replies)
    if model.calls or model.reasoning
]
REASONING = {name: model for name, model in MODELS.items() if model.reasoning}
CALLING = {name: model for name, model in MODELS.items() if model.calls}
SWITCHED = {name: model for name, model in MODELS.items() if model.off is not None}


def each(models: dict[str, Chat]) -> pytest.MarkDecorator:
    """Run a test with each of some models."""
    return pytest.mark.parametrize("model", models.values(), ids=models)


def fields_of(model: Chat, variables: Any) -> dict[str, Any]:
    """Return a request's fields: tools where the model knows them, and its template's variables."""
    return {"tools": TOOLS if model.calls else None, "chat_template_kwargs": dict(variables or {})}


def think_briefly(model: Chat) -> str:
    """Return what comes before a constrained answer, behind which no more than two lines end."""
    return (model.thought % THOUGHT).replace("\n\n\n", "\n\n")


@each(MODELS)
def test_auto_knows_the_model_by_its_template(model: Chat) -> None:
    assert find_call_format(model.template) == model.calls
    form = REASONING_FORMATS.get(model.reasoning)
    assert find_reasoning_format(model.template) == (form and replace(form, begins_inside=False))


def test_a_model_without_formats_answers_with_text_alone() -> None:
    assert read_chat(MODELS["Ernie-4.5"].template, tools=None).reply.message is None


@pytest.mark.parametrize(("model", "reply"), CASES)
def test_replies_are_read_at_every_cut(model: Chat, reply: Reply) -> None:
    _, form = read_form(model.template, **fields_of(model, model.on))
    assert form.is_reasoning_open is (True if model.is_open else None)
    answer = model.answer % reply.text
    text = model.thought % THOUGHT + answer if model.reasoning else answer
    expected = (model.kept % THOUGHT if model.reasoning else "", model.gap + reply.content, list(reply.calls))
    for pieces in cuts_of(text):
        assert meaning_of(parse(form, pieces)) == expected


@pytest.mark.parametrize(("model", "reply"), CASES)
def test_a_reply_without_reasoning_is_an_answer(model: Chat, reply: Reply) -> None:
    """As models answer that are told not to reason, and those that need not."""
    if model.is_open:
        return
    _, form = read_form(model.template, **fields_of(model, model.off))
    for pieces in cuts_of(reply.text):
        assert meaning_of(parse(form, pieces)) == ("", reply.content, list(reply.calls))


@each(REASONING)
def test_reasoning_that_is_cut_off_is_reasoning(model: Chat) -> None:
    _, form = read_form(model.template, **fields_of(model, model.on))
    text = (model.thought % THOUGHT).partition(THOUGHT)[0] + THOUGHT
    for pieces in cuts_of(text):
        assert meaning_of(parse(form, pieces)) == (model.kept.partition("%s")[0] + THOUGHT, "", [])


@each(CALLING)
@pytest.mark.parametrize("thinks", [True, False])
def test_forced_calls_are_calls_and_follow_the_reasoning(model: Chat, thinks: bool) -> None:
    fields = fields_of(model, model.on if thinks else model.off)
    parsed, form = read_form(model.template, tool_choice="required", **fields)
    params = constrain_message(parsed.params, parsed.tool_use, form).structured_outputs
    assert params is not None
    automaton = PlainAutomaton(compile_structured(params).data)
    is_always_open = model.is_open and model.off is None
    before = think_briefly(model) if model.reasoning and (thinks or is_always_open) else ""
    call = CALL_TEXTS["mistral, named" if "[ARGS]" in model.template else model.calls]
    assert automaton.accepts(f"{before}{call}".encode())
    assert meaning_of(parse(form, list(before + call)))[2] == [("book_room", {"hotel": "7"})]
    assert not automaton.accepts(f"{before}I will book it.".encode())


@each(REASONING)
def test_a_form_of_the_answer_holds_behind_the_reasoning(model: Chat) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = fields_of(model, model.on) | {"tools": None, "response_format": asked}
    parsed, form = read_form(model.template, **fields)
    structured = constrain_message(parsed.params, None, form).structured_outputs
    assert structured is not None
    automaton = PlainAutomaton(compile_structured(structured).data)
    before = think_briefly(model)
    assert automaton.accepts(f'{before}{{"ok": true}}'.encode())
    assert not automaton.accepts(f"{before}Yes.".encode())


@each(CALLING)
def test_earlier_calls_are_shown_as_the_model_writes_them(model: Chat) -> None:
    text = render(model.template, TALK[3:])
    form = replace(read_form(model.template)[1], reasoning=None)
    answer = text[text.rindex("Second.") : text.rindex("Booked.")].replace("Recent thought.", "")
    assert meaning_of(parse(form, [answer]))[2] == [("book_room", {"hotel": "7", "nights": 3})]


@each(SWITCHED)
def test_a_prompt_that_closes_the_reasoning_lets_none_begin(model: Chat) -> None:
    prompt = render(model.template, [USER], chat_template_kwargs=dict(model.off or {}))
    _, form = read_form(model.template, **fields_of(model, model.off))
    closes = bool(model.parts.get("OPEN"))
    assert form.is_reasoning_open is (False if closes else None)
    assert prompt.rstrip().endswith(REASONING_FORMATS[model.reasoning].close) is closes


# How calls are forced, by their format.
CALL_TEXTS = {
    "hermes": '<tool_call>\n{"name": "book_room", "arguments": {"hotel": "7"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "book_room", "arguments": {"hotel": "7"}}]',
    "mistral, named": '[TOOL_CALLS]book_room[ARGS]{"hotel": "7"}',
    "granite": '<|tool_call|>[{"name": "book_room", "arguments": {"hotel": "7"}}]',
    "gemma4": '<|tool_call>call:book_room{hotel:<|"|>7<|"|>}<tool_call|>',
    "olmo3": '<function_calls>book_room(hotel="7")</function_calls>',
    "seed_oss": "<seed:tool_call>\n<function=book_room>\n<parameter=hotel>\n7\n</parameter>\n</function>\n"
    "</seed:tool_call>",
    "glm45": "<tool_call>book_room\n<arg_key>hotel</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    "glm47": "<tool_call>book_room<arg_key>hotel</arg_key><arg_value>7</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="book_room">\n<parameter name="hotel">7</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>book_room\n```json\n"
    '{"hotel": "7"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book_room<｜tool▁sep｜>"
    '{"hotel": "7"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.book_room:0<|tool_call_argument_begin|>"
    '{"hotel": "7"}<|tool_call_end|><|tool_calls_section_end|>',
}
