# SPDX-License-Identifier: Apache-2.0
"""From the items of a response's input to the messages of a chat."""

from __future__ import annotations

from typing import Any

from blink.api.openai.responses.tools import Item, chat_call
from blink.errors import BadRequestError

_ROLES = ("user", "assistant", "system", "developer")
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
# What another server's tools did, which it told the model by other means.
_PASSED = (
    "file_search_call",
    "image_generation_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)


def add_item(messages: list[Item], item: Item, place: str) -> None:
    """Append an item of the conversation; reasoning, text and calls that follow each other become one message.

    Raises:
        BadRequestError: it is of a type or a role that there is no message for.
    """
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise BadRequestError(f"{place}.role must be one of {', '.join(_ROLES)}.", "input")
        if role == "assistant":
            _turn_for(messages, "content", "tool_calls")["content"] = item.get("content")
        else:
            messages.append({"role": role, "content": item.get("content")})
    elif kind in _CALLS:
        _turn_for(messages).setdefault("tool_calls", []).append(chat_call(item))
    elif kind in _RESULTS:
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        text = _reasoning_of(item)
        _turn_for(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
    elif kind not in _PASSED:
        raise BadRequestError(f"{place}: items of type {str(kind)[:64]!r} are not supported.", "input")


def _reasoning_of(item: Item) -> str:
    parts = item.get("content")
    texts: list[Any] = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _turn_for(messages: list[Item], *later: str) -> Item:
    """Return the assistant's message that goes on, a new one if the last has one of these fields already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in later):
        messages.append({"role": "assistant"})
    return messages[-1]
