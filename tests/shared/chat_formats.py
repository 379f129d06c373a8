# SPDX-License-Identifier: Apache-2.0
"""Read replies as those of a chat template are read, with two functions to call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson

import fake_engine
from blink.api.openai.schema import ChatBody
from blink.api.reading import read_body
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.request.rendering import render_messages
from blink.text.assets import ModelAssets
from blink.text.message.formats import CALL_FORMATS, find_call_format, fit_call_format
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reasoning, merge
from blink.text.message.reasoning_formats import find_reasoning_format
from blink.text.template import ChatTemplate
from blink.text.tokenizer import Tokenizer
from harmony_model import build_tokenizer
from qwen_templates import SCHEMAS

ENGINE = replace(fake_engine.ENGINE, max_model_len=1 << 14, vocab_size=512, can_constrain=True)
BOUNDS = Bounds(max_tokenize_chars=1 << 16, model_names=("m",), engine=ENGINE)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
USER = {"role": "user", "content": [{"type": "text", "text": "A room."}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "book_room", "arguments": '{"hotel": "7", "nights": 3}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First."},
    {"role": "assistant", "content": "One.", "reasoning_content": "Earlier thought."},
    {"role": "user", "content": "Second."},
    {"role": "assistant", "content": "", "reasoning_content": "Recent thought.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Booked."},
]


def assets_of(template: str) -> ModelAssets:
    """Return what `auto` makes of a template."""
    form = CALL_FORMATS.get(find_call_format(template))
    return ModelAssets(
        root="",
        tokenizer=Tokenizer(build_tokenizer()),
        chat_template=ChatTemplate(template, {}),
        eos_token_ids=(),
        call_format=form and fit_call_format(form, template),
        reasoning_format=find_reasoning_format(template),
    )


def read_chat(template: str, **fields: Any) -> ParsedRequest:
    """Read a request with the fields of its body; without others it has one message and the tools."""
    body = {"messages": [USER], "tools": TOOLS, **fields}
    return read_body("chat", orjson.dumps(body), assets_of(template), BOUNDS)


def read_form(template: str, **fields: Any) -> tuple[ParsedRequest, MessageForm]:
    """Read a request, and how its replies are read."""
    parsed = read_chat(template, **fields)
    assert parsed.reply.message is not None
    return parsed, parsed.reply.message


def parse(form: MessageForm, pieces: Sequence[str]) -> list[Part]:
    """Return what a reply in pieces holds."""
    parser = MessageParser(form)
    return merge([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def meaning_of(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the reasoning, the content, and the calls with their arguments."""
    reasoning, content = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content)
    )
    names = [part.name for part in parts if isinstance(part, CallOpened)]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    return reasoning, content, list(zip(names, arguments, strict=True))


def cuts_of(text: str) -> Iterator[list[str]]:
    """Yield a text whole, in characters, and cut at each place."""
    yield [text]
    yield list(text)
    yield from ([text[:place], text[place:]] for place in range(1, len(text)))


def render(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return the prompt of a conversation with the tools."""
    body = ChatBody.model_validate({"messages": messages, "tools": TOOLS, **fields})
    return render_messages(body.messages, body.rendering({}), assets_of(template))
