# SPDX-License-Identifier: Apache-2.0
"""The parts of a message in the form of the chat API: deltas of a stream, or one whole message."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from blink.api.openai.choices import NO_PARTS
from blink.text.generation import Generation
from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reasoning

_ID_BYTES = 12
# The name that clients have known longest, and that of newer versions of vLLM.
_REASONING_NAMES = ("reasoning_content", "reasoning")


def new_call_id(form: MessageForm, name: str, index: int) -> str:
    """Return an id for a message's call of a function, in the form that the model's template takes."""
    if form.calls is not None and form.calls.id_form:
        return form.calls.id_form % (name, form.num_earlier_calls + index)
    length = form.calls.id_chars if form.calls is not None else 0
    return secrets.token_hex(_ID_BYTES)[:length] if length else f"call_{secrets.token_hex(_ID_BYTES)}"


class MessageDeltas:
    """Turn the parts of one message into deltas."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._call_idx = -1

    def encode(self, part: Part) -> dict[str, Any]:
        """Return the delta of a part."""
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return dict.fromkeys(_REASONING_NAMES, part.text)
        if isinstance(part, CallArguments):
            return {"tool_calls": [{"index": self._call_idx, "function": {"arguments": part.text}}]}
        self._call_idx += 1
        function = {"name": part.name, "arguments": ""}
        call_id = new_call_id(self._form, part.name, self._call_idx)
        call = {"index": self._call_idx, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}


def full_message(role: str, parts: Iterable[Part], form: MessageForm) -> dict[str, Any]:
    """Return the message of parts that are merged."""
    content, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, CallOpened):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": new_call_id(form, part.name, len(calls)), "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[-1]["function"]["arguments"] += part.text
        else:
            (content if isinstance(part, Content) else reasoning).append(part.text)
    message = {"role": role, "content": "".join(content) or None, **NO_PARTS, "tool_calls": calls}
    if not calls and not reasoning:
        message["content"] = message["content"] or ""
    if form.reasoning is not None:
        message |= dict.fromkeys(_REASONING_NAMES, "".join(reasoning) or None)
    return message


def finish_reason(
    generation: Generation, parser: MessageParser, form: MessageForm, *, calls_functions: bool = False
) -> str | None:
    """Return why a reply ended: as in OpenAI's API a call that was named beforehand is no reason."""
    if parser.num_calls and generation.finish_reason == "stop" and not form.is_named:
        return "function_call" if calls_functions else "tool_calls"
    return generation.finish_reason
