# SPDX-License-Identifier: Apache-2.0
"""Bring a conversation into the form that gpt-oss' chat template shows whole.

The template, as published, shows the first message's instructions only and one call of a message, names results after
the last call, and refuses content beside reasoning in a message with a call, and tools without a description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blink.errors import BadRequestError

_INSTRUCTING = ("system", "developer")
_EFFORTS = ("low", "medium", "high")
_BREAK = "\n\n"


def arrange_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return flattened messages with all instructions in the first, reasoning as `thinking`, and one call each."""
    instructions = [message["content"] for message in messages if message["role"] in _INSTRUCTING]
    rest = [dict(message) for message in messages if message["role"] not in _INSTRUCTING]
    arranged: list[dict[str, Any]] = []
    if instructions:
        arranged.append({"role": "developer", "content": _BREAK.join(filter(None, instructions))})
    while rest:
        message = rest.pop(0)
        if message["role"] != "assistant":
            arranged.append(message)
            continue
        message = _name_reasoning(message)
        calls = message.get("tool_calls", ())
        for call in calls[:-1]:
            arranged.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": "", "tool_calls": calls[-1:]}
            if (place := _find_result(call, rest)) is not None:
                arranged.append(rest.pop(place))
        arranged.append(message)
    return arranged


def _name_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    thinking = message.get("reasoning_content") or message.get("thinking")
    if not thinking:
        return message
    if message.get("tool_calls") and message["content"]:
        # In a message with a call the template takes the content for reasoning.
        rest = {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
        return {**rest, "content": f"{thinking}{_BREAK}{message['content']}"}
    return {**message, "thinking": thinking}


def _find_result(call: Mapping[str, Any], behind: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the place of a call's result among the results that follow at once."""
    for place, message in enumerate(behind):
        if message["role"] != "tool":
            break
        if message.get("tool_call_id") == call.get("id"):
            return place
    return None


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools each of which has a description, if an empty one."""
    return [{**tool, "function": _describe(tool.get("function") or {})} for tool in tools]


def _describe(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "description": function.get("description") or ""}


def spell(value: Any, spell_text: Callable[[str], str]) -> Any:
    """Return a value of JSON with each text in it spelled: what a client sends never makes a message of its own.

    Raises:
        BadRequestError: it is nested too deeply.
    """
    try:
        return _spell(value, spell_text)
    except RecursionError:
        raise BadRequestError("The messages are nested too deeply.", "messages") from None


def _spell(value: Any, spell_text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return spell_text(value)
    if isinstance(value, Mapping):
        return {_spell(name, spell_text): _spell(each, spell_text) for name, each in value.items()}
    return [_spell(each, spell_text) for each in value] if isinstance(value, list | tuple) else value


def check_effort(effort: object) -> None:
    """Refuse an effort that the models do not know.

    Raises:
        BadRequestError: it is none of theirs.
    """
    if effort not in _EFFORTS:
        raise BadRequestError(
            f"This model's reasoning_effort must be one of {', '.join(_EFFORTS)}.", "reasoning_effort"
        )
