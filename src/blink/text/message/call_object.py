# SPDX-License-Identifier: Apache-2.0
"""Read one tool call written as an object, {"name": ..., "arguments": {...}}, while it grows."""

from __future__ import annotations

import json
from collections.abc import Container

from blink.text.message.json_value import JsonValue, Status
from blink.text.message.parts import CallArguments, CallOpened, Part

SPACE = " \t\r\n"
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_NO_ARGUMENTS = "{}"
_KEY, _COLON, _VALUE, _COMMA = range(4)  # what is expected next


class CallObject:
    """One call. It opens when its name is known and its arguments, if any, begin to be an object."""

    def __init__(self, names: Container[str] | None = None) -> None:
        """Begin at the brace; `names`, if given, are those that make a call of an object."""
        self.status = Status.OPEN
        self.is_opened = False
        self._names = names
        self._has_begun = False
        self._expected = _KEY
        self._key = ""
        self._value: JsonValue | None = None
        self._raw: list[str] = []  # of the value, where it is not passed on at once
        self._name: str | None = None
        self._arguments: str | None = None  # came before the name, or as a string
        self._streams = False  # the value goes out as it comes
        self._has_arguments = False

    def feed(self, text: str, place: int, parts: list[Part]) -> int:
        """Take the text from `place` on, append what is new, and return where the object or the text ends."""
        while place < len(text) and self.status is Status.OPEN:
            if self._value is not None:
                place = self._feed_value(self._value, text, place, parts)
            elif text[place] in SPACE:
                place += 1
            elif self._expected == _VALUE:
                self._begin_value(text[place], parts)
            else:
                place += self._take(text[place], parts)
        return place

    def finish(self, parts: list[Part]) -> None:
        """Note that no more text comes."""

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to belong to the call."""
        return self._streams and not any(closer in text for closer in "}]")

    def _take(self, character: str, parts: list[Part]) -> int:
        """Take a character between values; return 1, or 0 where it does not belong to the object."""
        if not self._has_begun:
            self._has_begun = True  # the brace
        elif character == "}" and self._expected in (_KEY, _COMMA):
            self._end(parts)
        elif self._expected == _KEY and character == '"':
            self._value = JsonValue()
            return 0
        elif self._expected == _COLON and character == ":":
            self._expected = _VALUE
        elif self._expected == _COMMA and character == ",":
            self._expected = _KEY
        else:
            self.status = Status.BROKEN
        return 0 if self.status is Status.BROKEN else 1

    def _begin_value(self, first: str, parts: list[Part]) -> None:
        self._value = JsonValue()
        is_arguments = self._key in _ARGUMENTS and not self._has_arguments
        if is_arguments and self._name is not None and first == "{":
            self._streams = self._has_arguments = True
            self._open(parts)

    def _feed_value(self, value: JsonValue, text: str, place: int, parts: list[Part]) -> int:
        end = value.feed(text, place)
        if self._streams and end > place:
            parts.append(CallArguments(text[place:end]))
        elif not self._streams:
            self._raw.append(text[place:end])
        if value.status is Status.BROKEN:
            self.status = Status.BROKEN
        elif value.status is Status.DONE:
            self._value = None
            self._note_value()
        return end

    def _note_value(self) -> None:
        raw = "".join(self._raw)
        self._raw.clear()
        if self._expected == _KEY:
            self._key, self._expected = _loads_text(raw) or "", _COLON
            return
        self._expected = _COMMA
        if self._streams:
            self._streams = False
        elif self._key in _NAMES and self._name is None:
            self._name = _loads_text(raw)
            if not self._name:
                self.status = Status.BROKEN
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._arguments = _as_object(raw)
            if self._arguments is None:
                self.status = Status.BROKEN

    def _open(self, parts: list[Part]) -> None:
        if self._name is None or (self._names is not None and self._name not in self._names):
            self.status = Status.BROKEN
            return
        self.is_opened = True
        parts.append(CallOpened(self._name))

    def _end(self, parts: list[Part]) -> None:
        if not self.is_opened:
            self._open(parts)
            if self.is_opened:
                parts.append(CallArguments(self._arguments or _NO_ARGUMENTS))
        if self.status is Status.OPEN:
            self.status = Status.DONE


def _loads_text(raw: str) -> str | None:
    try:
        text = json.loads(raw, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _as_object(raw: str) -> str | None:
    """Return arguments as the JSON of an object; some models write them as a string, or null for none."""
    if raw.startswith("{"):
        return raw
    if raw == "null":
        return _NO_ARGUMENTS
    text = (_loads_text(raw) or "").strip() if raw.startswith('"') else ""
    return text if text.startswith("{") else None
