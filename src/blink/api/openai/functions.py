# SPDX-License-Identifier: Apache-2.0
"""OpenAI's older form of tools, `functions` and `function_call`: read as tools, and answered in its own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blink.errors import BadRequestError

_FUNCTIONS, _CALL = "functions", "function_call"
_ID = "call_%d"  # of the function call in a conversation's message of that number


def with_tools(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat's body in which tools stand for functions, and calls of tools for function calls.

    Raises:
        BadRequestError: it has both forms, or one is malformed.
    """
    messages = fields.get("messages")
    if isinstance(messages, list) and any(map(_is_older, messages)):
        fields = {**fields, "messages": _messages_of(messages)}
    functions, choice = fields.get(_FUNCTIONS), fields.get(_CALL)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise BadRequestError("When using `function_call`, `functions` must be set.", _CALL)
        return fields
    if fields.get("tools") or fields.get("tool_choice") not in (None, "auto"):
        raise BadRequestError("Set either functions or tools.", _FUNCTIONS)
    if not isinstance(functions, list):
        raise BadRequestError("functions must be a list.", _FUNCTIONS)
    tools = [{"type": "function", "function": function} for function in functions]
    return {**fields, "tools": tools, "tool_choice": _choice_of(choice), "parallel_tool_calls": False}


def with_function_call(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, or a delta of one, in which a call of a tool is a function call."""
    calls = message.pop("tool_calls", None)
    return message | {_CALL: calls[0]["function"]} if calls else message


def _choice_of(choice: Any) -> Any:
    if choice is None or choice in ("none", "auto"):
        return choice
    if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise BadRequestError('function_call must be "none", "auto" or {"name": ...}.', _CALL)
    return {"type": "function", "function": {"name": choice["name"]}}


def _is_older(message: Any) -> bool:
    return isinstance(message, dict) and (message.get(_CALL) is not None or message.get("role") == "function")


def _messages_of(messages: Sequence[Any]) -> list[Any]:
    """Return messages with tool calls; the answer of a function belongs to the last call before it."""
    found: list[Any] = []
    last = _ID % 0
    for index, message in enumerate(messages):
        if not _is_older(message):
            found.append(message)
        elif message.get("role") == "function":
            found.append({**message, "role": "tool", "tool_call_id": last})
        else:
            last, rest = _ID % index, {name: value for name, value in message.items() if name != _CALL}
            call = {"id": last, "type": "function", "function": message[_CALL]}
            found.append({**rest, "tool_calls": [call]})
    return found
