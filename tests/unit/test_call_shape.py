# SPDX-License-Identifier: Apache-2.0
"""The format of calls is read off a template that writes a mark, the name, another mark and JSON, and off no other."""

from __future__ import annotations

from typing import Any

import pytest

from blink.text.call_shape import read_call_shape
from blink.text.message.format_kinds import CallFormat
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, merge
from blink.text.message.tool_use import Function, ToolUse, constrain
from blink.text.template import ChatTemplate

NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
# The shape, one call as it is written, and what stands between two.
SHAPES = {
    f"<call:{NAME}>{JSON}</call>": ('<call:add>{"a": 1}</call>', ""),
    f"{{{{ '\\n' }}}}<%{NAME}%{JSON}%>": ('<%add%{"a": 1}%>', "\n"),
    f"<<{NAME}{JSON};": ('<<add{"a": 1};', ""),
    "{{ '[[do ' + c.function.name + ' with ' + c.function.arguments + ']]' }}": ('[[do add with {"a": 1}]]', ""),
}


def template_of(shape: str, end: str = "<|end|>") -> ChatTemplate:
    return ChatTemplate(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        + shape
        + ("{% endfor %}" + end + "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}")
        + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        {},
    )


def form_of(shape: str, end: str = "<|end|>") -> CallFormat:
    form = read_call_shape(template_of(shape, end))
    assert form is not None
    return form


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("end", ["<|end|>", "", "]"])
def test_forced_calls_are_written_as_the_template_writes_earlier_ones(shape: str, end: str) -> None:
    written, between = SHAPES[shape]
    tag = constrain(ToolUse((Function("add"),), "required"), form_of(shape, end))
    assert tag is not None and tag.separator == between
    assert [tag.tags[0].begin + '{"a": 1}' + tag.tags[0].end] == [written]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_calls_are_read_however_they_are_cut(shape: str, step: int) -> None:
    written, between = SHAPES[shape]
    parser = MessageParser(MessageForm(calls=form_of(shape), names=frozenset({"add"})))
    text = f"So: {written}{between}{written}"
    pieces = [text[place : place + step] for place in range(0, len(text), step)]
    parts = merge([part for piece in pieces for part in parser.push(piece)] + parser.finish())
    call: list[Any] = [CallOpened("add"), CallArguments('{"a": 1}')]
    assert parts == [Content("So:"), *call, *call]


@pytest.mark.parametrize(
    "shape",
    [
        "",
        NAME + JSON,
        f"do {NAME}{JSON}",
        f'<x>{{"name": "{NAME}", "arguments": {JSON}}}</x>',
        f"<x>{NAME}{{% for k, v in c.function.arguments.items() %}}<{{{{ k }}}}>{{{{ v }}}}{{% endfor %}}</x>",
        f"<x>{{{{ c.id }}}}{NAME} {JSON}</x>",
    ],
)
def test_other_shapes_are_not_guessed(shape: str) -> None:
    assert read_call_shape(template_of(shape)) is None
