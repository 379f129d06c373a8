# SPDX-License-Identifier: Apache-2.0
"""Bring a conversation into the form that gpt-oss' chat template shows whole.

The template, as published, shows the first message's instructions only, and one call of a message. It names results
after the last call. It refuses content next to reasoning in a message with a call, and tools without a description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blink.errors import BadRequestError
from blink.text.call_turns import split_calls
from blink.text.template_traits import INSTRUCTING

_ROLES = (*INSTRUCTING, "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high")
_BREAK = "\n\n"


def arrange_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return flattened messages with all instructions in the first, reasoning as `thinking`, and one call each.

    Raises:
        BadRequestError: a message has a role that the template would leave out.
    """
    if unknown := next((message["role"] for message in messages if message["role"] not in _ROLES), ""):
        raise BadRequestError(f"This model knows no role {unknown!r}; its roles are {', '.join(_ROLES)}.", "messages")
    instructions = [message["content"] for message in messages if message["role"] in INSTRUCTING]
    rest = [_name_reasoning(message) for message in messages if message["role"] not in INSTRUCTING]
    arranged = split_calls(rest)
    if instructions:
        arranged.insert(0, {"role": "developer", "content": _BREAK.join(filter(None, instructions))})
    return arranged


def _name_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    thinking = message.get("reasoning_content")
    if not thinking or message["role"] != "assistant":
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message.get("tool_calls") and message["content"]:
        # In a message with a call the template takes the content for reasoning.
        return {**rest, "content": f"{thinking}{_BREAK}{message['content']}"}
    return {**rest, "thinking": thinking}


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools each of which has a description, if an empty one."""
    return [{**tool, "function": _describe(tool.get("function") or {})} for tool in tools]


def _describe(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "description": function.get("description") or ""}


def spell(value: Any, spell_text: Callable[[str], str]) -> Any:
    """Return a value of JSON with each text in it spelled: what a client sends never makes a message of its own."""
    if isinstance(value, str):
        return spell_text(value)
    if isinstance(value, Mapping):
        return {spell(name, spell_text): spell(each, spell_text) for name, each in value.items()}
    return [spell(each, spell_text) for each in value] if isinstance(value, list | tuple) else value


def check_effort(effort: object) -> None:
    """Refuse an effort that the models do not know.

    Raises:
        BadRequestError: it is none of theirs.
    """
    if effort not in _EFFORTS:
        raise BadRequestError(
            f"This model's reasoning_effort must be one of {', '.join(_EFFORTS)}.", "reasoning_effort"
        )
