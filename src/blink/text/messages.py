# SPDX-License-Identifier: Apache-2.0
"""Check chat messages and flatten their content parts into the text that templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blink.errors import BadRequestError


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with content as one string each; text parts are joined by newlines, as vLLM does.

    Raises:
        BadRequestError: a message has no role, or content that is not text.
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
    return {**message, "content": content}


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRequestError(f"{place}: parts of type {kind!r} are not supported; only text is.", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequestError(f"{place}.text must be a string.", "messages")
    return text
