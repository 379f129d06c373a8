# SPDX-License-Identifier: Apache-2.0
"""Reads server-sent events as they come in pieces: counts those with output, and parses JSON only at the end."""

from __future__ import annotations

import json
from typing import Any


class EventReader:
    """The events of one answer."""

    def __init__(self) -> None:
        self.is_done = False
        self._tail = b""
        self._usage = b""
        self._error = b""

    def feed(self, data: bytes) -> int:
        """Take the next piece of the body; return how many events with output it completes."""
        if b"\r" in data:  # inside of JSON it is always escaped
            data = data.replace(b"\r", b"")
        events = (self._tail + data).split(b"\n\n")
        self._tail = events.pop()
        count = 0
        for event in events:
            count += self._has_output(event)
        return count

    def completion_tokens(self) -> int | None:
        """Return how many tokens the server says it made; None if it does not say."""
        return self._usage_field("completion_tokens")

    def prompt_tokens(self) -> int | None:
        """Return how many tokens the server says the prompt has; None if it does not say."""
        return self._usage_field("prompt_tokens")

    def error(self) -> str:
        """Return the message of an error sent as an event; empty if there was none."""
        return error_message(_json_of(self._error)) if self._error else ""

    def _has_output(self, event: bytes) -> bool:
        if not event.startswith(b"data:") and b"\ndata:" not in event:
            return False  # a comment that keeps the connection alive
        if event.endswith(b"[DONE]"):
            self.is_done = True
            return False
        if b'"completion_tokens"' in event:
            self._usage = event
        if b'"choices"' not in event:
            if b'"error"' in event:
                self._error = event
            return False
        return b'"choices":[]' not in event and b'"choices": []' not in event

    def _usage_field(self, name: str) -> int | None:
        value = _json_of(self._usage).get("usage", {}).get(name) if self._usage else None
        return value if isinstance(value, int) else None


def error_message(body: Any) -> str:
    """Take the message from an error body in any of the forms that servers use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _json_of(event: bytes) -> dict[str, Any]:
    text = event[event.index(b"data:") + len(b"data:") :]
    try:
        found = json.loads(text)
    except ValueError:
        return {"error": text.decode(errors="replace")}
    return found if isinstance(found, dict) else {"error": found}
