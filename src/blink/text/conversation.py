# SPDX-License-Identifier: Apache-2.0
"""Check the messages of a conversation and bring them into the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from blink.errors import BadRequestError
from blink.text.json_weight import MAX_JSON_DEPTH, may_be_deep, weigh_json

_REASONING_NAMES = ("reasoning_content", "reasoning")


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with content as one string each; text parts are joined by newlines, as vLLM does.

    The arguments of earlier calls, which clients send as JSON, become objects, which is what templates expect.

    Raises:
        BadRequestError: a message has no role, content that is not text, or calls without a form.
    """
    return [_flatten(message, f"messages.{index}") for index, message in enumerate(messages)]


def _flatten(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequestError(f"{place}.role must be a non-empty string.", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [_text_of(part, f"{place}.content.{index}") for index, part in enumerate(content)]
        content = "\n".join(texts)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise BadRequestError(f"{place}.content must be a string or a list of parts.", "messages")
    flat = {**message, "content": content}
    calls = flat.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise BadRequestError(f"{place}.tool_calls must be a list.", "messages")
        flat["tool_calls"] = [_call_of(call, f"{place}.tool_calls.{index}") for index, call in enumerate(calls)]
    reasoning = next((flat.pop(name) for name in _REASONING_NAMES if isinstance(flat.get(name), str)), None)
    if reasoning is not None:
        flat[_REASONING_NAMES[0]] = reasoning
    return flat


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRequestError(f"{place}: parts of type {kind!r} are not supported; only text is.", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequestError(f"{place}.text must be a string.", "messages")
    return text


def _call_of(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"{place}.function must be an object with a name.", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object_of(arguments, place)
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise BadRequestError(f"{place}.function.arguments must be a string that holds JSON.", "messages")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _object_of(arguments: str, place: str) -> dict[str, Any] | str:
    """Return the object that arguments are; what a model once wrote wrongly stays as it is: the talk must go on."""
    if not arguments.strip():
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    if not isinstance(value, dict):
        return arguments
    data = arguments.encode()
    if may_be_deep(data) and weigh_json(data).depth > MAX_JSON_DEPTH:
        raise BadRequestError(f"{place}.function.arguments must be nested at most {MAX_JSON_DEPTH} deep.", "messages")
    return value
