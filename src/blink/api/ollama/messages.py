# SPDX-License-Identifier: Apache-2.0
"""From Ollama's messages to those of a chat: calls get ids, by which their results are told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from blink.errors import BadRequestError

_IMAGES = "images: this server's models read text."


class Function(BaseModel):
    """What a call calls."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])


class Call(BaseModel):
    """A call of an earlier answer."""

    id: str | None = None
    function: Function


class OllamaMessage(BaseModel):
    """One message. tool_name: the function whose result it is."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | None = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    name: str | None = None  # an older name of tool_name
    tool_call_id: str | None = None


def refuse_images(images: Sequence[Any] | None) -> None:
    """Refuse a request that shows pictures.

    Raises:
        BadRequestError: it does.
    """
    if images:
        raise BadRequestError(_IMAGES, "images")


def chat_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    Raises:
        BadRequestError: one shows pictures.
    """
    awaited: list[tuple[str, str]] = []  # ids and names of the calls that have no result yet
    return [_message_of(message, index, awaited) for index, message in enumerate(messages)]


def _message_of(message: OllamaMessage, index: int, awaited: list[tuple[str, str]]) -> dict[str, Any]:
    refuse_images(message.images)
    flat: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        flat["reasoning_content"] = message.thinking
    if message.tool_calls:
        calls = [(call.id or _new_id(index, place), call.function) for place, call in enumerate(message.tool_calls)]
        awaited += [(call_id, function.name) for call_id, function in calls]
        flat["tool_calls"] = [
            {"id": call_id, "type": "function", "function": function.model_dump()} for call_id, function in calls
        ]
    if message.role == "tool":
        name = message.tool_name or message.name
        flat |= {"tool_call_id": message.tool_call_id or _take_call(name, awaited)} | ({"name": name} if name else {})
    return flat


def _new_id(index: int, place: int) -> str:
    """Return an id of nine letters and digits, which every model's template takes."""
    return f"call{index % 1000:03}{place % 100:02}"


def _take_call(name: str | None, awaited: list[tuple[str, str]]) -> str:
    """Return the id of the oldest call whose result this may be."""
    for pair in awaited:
        if name in (None, pair[1]):
            awaited.remove(pair)
            return pair[0]
    return _new_id(0, 0)
