# SPDX-License-Identifier: Apache-2.0
"""Check the messages of a conversation and bring them into the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from blink.errors import BadRequestError
from blink.text.json_weight import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_ITEMS, may_be_deep, weigh_json
from blink.text.template_traits import REASONING_NAMES

# Parts of a message that are text, and the field that it is in.
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def flatten_messages(messages: Sequence[Mapping[str, Any]], *, text_arguments: bool = False) -> list[dict[str, Any]]:
    """Return the messages with content as one string each; text parts are joined by newlines, as vLLM does.

    A refusal is content, too. Reasoning, whatever its name, becomes `reasoning_content`. The arguments of earlier
    calls, which clients send as JSON, become objects, as most templates expect, or stay text (`text_arguments`).

    Raises:
        BadRequestError: a message has no role, content that is not text, or calls without a form; or the arguments of
            calls hold too much.
    """
    if not text_arguments:
        _check_weight([text.encode() for text in _list_arguments(messages)])
    return [_flatten(message, f"messages.{index}", text_arguments) for index, message in enumerate(messages)]


def _list_arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the arguments of calls that are texts, whatever else is wrong with a message."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def _check_weight(texts: Sequence[bytes]) -> None:
    """Refuse arguments that would become more objects than a body's own may."""
    if sum(map(len, texts)) <= MAX_JSON_CONTAINERS:  # each takes a byte
        return
    weights = [weigh_json(text) for text in texts]
    if (
        sum(weight.containers for weight in weights) > MAX_JSON_CONTAINERS
        or sum(weight.items for weight in weights) > MAX_JSON_ITEMS
    ):
        raise BadRequestError(
            f"messages: the arguments of tool calls hold too much: at most {MAX_JSON_CONTAINERS} lists and objects "
            f"with {MAX_JSON_ITEMS} members.",
            "messages",
        )


def _flatten(message: Mapping[str, Any], place: str, text_arguments: bool) -> dict[str, Any]:
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
    if refusal := _pop_text(flat, "refusal", place):
        flat["content"] = f"{content}\n{refusal}" if content else refusal
    calls = flat.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise BadRequestError(f"{place}.tool_calls must be a list.", "messages")
        flat["tool_calls"] = [
            _call_of(call, f"{place}.tool_calls.{index}", text_arguments) for index, call in enumerate(calls)
        ]
    reasoning = [_pop_text(flat, name, place) for name in REASONING_NAMES]
    if any(reasoning):
        flat[REASONING_NAMES[0]] = next(filter(None, reasoning))
    return flat


def _pop_text(message: dict[str, Any], name: str, place: str) -> str:
    text = message.pop(name, None)
    if text is not None and not isinstance(text, str):
        raise BadRequestError(f"{place}.{name} must be a string.", "messages")
    return text or ""


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = _TEXT_FIELDS.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
    if name is None:
        raise BadRequestError(f"{place}: parts of type {kind!r} are not supported; only text is.", "messages")
    text = part.get(name)
    if not isinstance(text, str):
        raise BadRequestError(f"{place}.{name} must be a string.", "messages")
    return text


def _call_of(call: Any, place: str, text_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"{place}.function must be an object with a name.", "messages")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise BadRequestError(f"{place}.function.arguments must be a string that holds JSON.", "messages")
    if text_arguments and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not text_arguments:
        arguments = _object_of(arguments, place)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _object_of(arguments: str, place: str) -> dict[str, Any] | str:
    """Return the object that arguments are; what a model once wrote wrongly stays as it is: the talk must go on."""
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
