# SPDX-License-Identifier: Apache-2.0
"""Chats of models that reason: whether their prompt, or the client, leaves the reply inside of the reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

import fake_engine
from blink.api.reading import read_body
from blink.api.serving.parsed_request import Bounds
from blink.text.assets import ModelAssets
from blink.text.message.formats import HERMES
from blink.text.message.parser import MessageParser
from blink.text.message.parts import Content, Part, Reasoning, merge
from blink.text.message.reasoning_formats import REASONING_FORMATS
from blink.text.template import ChatTemplate
from blink.text.tokenizer import Tokenizer
from harmony_model import build_tokenizer

ENGINE = replace(fake_engine.ENGINE, max_model_len=512, vocab_size=512, max_sequences=4, can_constrain=False)
BOUNDS = Bounds(max_tokenize_chars=1000, model_names=("m",), engine=ENGINE)


def parts_of(reply: str, reasoning: str, template: str, begun: str, **fields: Any) -> list[Part]:
    """What a reply is read as, behind a message that has begun."""
    assets = ModelAssets(
        root="",
        tokenizer=Tokenizer(build_tokenizer()),
        chat_template=ChatTemplate(template, {}),
        eos_token_ids=(),
        call_format=HERMES,
        reasoning_format=REASONING_FORMATS[reasoning],
    )
    body = orjson.dumps({"messages": [{"role": "assistant", "content": begun}], **fields})
    form = read_body("chat", body, assets, BOUNDS).reply.message
    assert form is not None
    parser = MessageParser(form)
    return merge([*parser.push(reply), *parser.finish()])


VARIABLES: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"chat_template_kwargs": {"enable_thinking": True, "thinking": None}}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ({"chat_template_kwargs": {"thinking": False}}, True),
    ({"add_generation_prompt": False, "continue_final_message": True}, True),
]


@pytest.mark.parametrize(("fields", "is_answer"), VARIABLES)
@pytest.mark.parametrize("prompt", ["{{ messages[-1].content }}", "{{ messages[-1].content }}<think>"])
def test_a_model_that_is_not_to_reason_answers_at_once(fields: Any, is_answer: bool, prompt: str) -> None:
    parts = parts_of(" far.", "deepseek_r1", prompt, "So", **fields)
    is_open = prompt.endswith("<think>") and "continue_final_message" not in fields
    assert parts == ([Content(" far.")] if is_answer and not is_open else [Reasoning(" far.")])


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_a_message_is_continued_inside_of_its_reasoning_or_behind_it(name: str) -> None:
    talk = {"add_generation_prompt": False, "continue_final_message": True}
    template = "{{ messages[-1].content }}"
    inside = parts_of("think.</think>Done.", name, template, "<think>Let me", **talk)
    assert [type(part) for part in inside] == [Reasoning, Content]
    behind = parts_of(", sir.", name, template, "<think>No.</think>Yes", **talk)
    assert [type(part) for part in behind] == [Content]


@pytest.mark.parametrize("asked", [True, False])
def test_a_request_may_ask_for_content_in_any_case(asked: bool) -> None:
    fields = {"chat_template_kwargs": {"force_nonempty_content": asked}}
    parts = parts_of("far.", "nemotron_v3", "{{ messages[-1].content }}", "So", **fields)
    assert parts == [Reasoning("far."), *([Content("far.")] if asked else [])]
