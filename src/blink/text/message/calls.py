# SPDX-License-Identifier: Apache-2.0
"""Tell tool calls from content while a message grows. Nothing that a model writes is an error.

What looks like a call and is none becomes content. A call that has been opened stays: its arguments may be malformed.
The parts are the same however the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from blink.text.message.call_object import SPACE, CallObject
from blink.text.message.formats import CallFormat
from blink.text.message.json_value import JsonValue, Status
from blink.text.message.markers import Markers
from blink.text.message.parts import CallArguments, CallOpened, Content, Part, Reading, merge

_PREFIXED_NAME = r"([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:%s)?\s*"  # with the mark before its arguments
_NAME_CHARACTERS = r"[\w.\-\[\]\s%s]*"
_MAX_NAME = 256
_PIECE_CHARS = 1024


class CallParser:
    """Parse the text of one message in a format."""

    def __init__(self, form: CallFormat, names: Container[str], *, parallel: bool = True) -> None:
        """Expect calls of `names`: what stands without a marker is a call only if it has one of these."""
        self.num_calls = 0
        self._form = form
        mark = re.escape(form.arguments_mark)
        self._prefixed_name = re.compile(_PREFIXED_NAME % mark)
        self._name_characters = re.compile(_NAME_CHARACTERS % mark)
        self._names = names
        self._parallel = parallel
        self._opens, self._closes = Markers(form.opens), Markers((*form.opens, *form.closes))
        self._step: Callable[[list[Part]], bool] = self._begin if form.is_bare else self._read_content
        self._buffer = ""
        self._attempt: list[str] = []  # what becomes content, should no call come of it
        self._space: list[str] = []  # at the content's end: dropped before calls
        self._object: CallObject | None = None
        self._value: JsonValue | None = None  # the arguments behind a prefixed name
        self._is_marked = False
        self._calls_in_region = 0

    @property
    def reading(self) -> Reading:
        """Return what the text that came last is."""
        if self._step == self._begin:
            return Reading.TEXT
        if self._step == self._read_content:
            # The space behind a call is none of the content where another call follows.
            is_unsure = self._buffer or (self.num_calls and self._space)
            return Reading.UNSURE if is_unsure else Reading.TEXT
        return Reading.CALL if self._calls_in_region else Reading.UNSURE

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to be what the text before it is."""
        if self._step in (self._read_object, self._read_arguments):
            return self._calls_in_region > 0 and "}" not in text
        return self._step == self._read_content and self.reading is Reading.TEXT and self._opens.cannot_begin_in(text)

    def push(self, text: str) -> list[Part]:
        """Return what the message has gained by a piece of text."""
        parts: list[Part] = []
        # In small pieces: each step cuts its own off the buffer.
        for start in range(0, len(text), _PIECE_CHARS):
            self._buffer += text[start : start + _PIECE_CHARS]
            while self._buffer and self._step(parts):
                pass
        return merge(parts)

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        parts: list[Part] = []
        rest, self._buffer = self._buffer, ""
        is_silent = self._step in (self._drop, self._read_arguments) or (
            self._object is not None and self._object.is_opened
        )
        if not is_silent:
            self._fall_back(rest, parts)
        if not self.num_calls and self._space:
            parts.append(Content("".join(self._space)))
        return merge(parts)

    def _begin(self, parts: list[Part]) -> bool:
        """At the message's beginning: look whether it begins with a call."""
        first = self._buffer.lstrip(SPACE)
        self._add_content(self._buffer[: len(self._buffer) - len(first)], parts)
        self._buffer = first
        if first:
            self._enter_region("", is_marked=False) if first[0] in "{[" else self._leave_region()
        return bool(first)

    def _read_content(self, parts: list[Part]) -> bool:
        found = self._opens.search(self._buffer)
        if found is None:
            certain = self._opens.certain(self._buffer)
            self._add_content(self._buffer[:certain], parts)
            self._buffer = self._buffer[certain:]
            return False
        start, end = found
        self._add_content(self._buffer[:start], parts)
        marker, self._buffer = self._buffer[start:end], self._buffer[end:]
        self._enter_region(marker, is_marked=True)
        return True

    def _read_between(self, parts: list[Part]) -> bool:
        """Inside a region of calls, before a call or behind one."""
        buffer = self._buffer
        length = self._closes.match(buffer)
        if length:
            self._cross(buffer[:length])
        elif buffer[0] in SPACE or buffer[0] in "[]" or (buffer[0] in ",;" and self._calls_in_region):
            if self._closes.may_begin(buffer):
                return False
            length = 1
            self._attempt.append(buffer[0])
        elif buffer[0] == "{":
            self._object = CallObject(None if self._is_marked else self._names)
            self._step = self._read_object
        elif self._closes.may_begin(buffer):
            return False
        elif self._form.has_prefixed_names and self._is_marked:
            self._step = self._read_name
        else:
            self._fall_back("", parts)
        self._buffer = buffer[length:]
        return True

    def _cross(self, marker: str) -> None:
        """Pass a marker inside a region: a closing one ends it."""
        if marker in self._form.closes and self._calls_in_region:
            self._leave_region()
        elif marker in self._form.closes or not self._calls_in_region:
            self._attempt.append(marker)
            if marker in self._form.closes:
                self._step = self._abandon
        else:
            self._enter_region(marker, is_marked=True)

    def _abandon(self, parts: list[Part]) -> bool:
        """A region without a call has ended: it was content."""
        self._fall_back("", parts)
        return True

    def _read_object(self, parts: list[Part]) -> bool:
        call = self._object
        assert call is not None
        was_opened, found = call.is_opened, list[Part]()
        place = call.feed(self._buffer, 0, found)
        if call.is_opened and not was_opened:
            self._note_call()
        parts += found
        if not call.is_opened:
            self._attempt.append(self._buffer[:place])
        self._buffer = self._buffer[place:]
        self._settle(call.status, parts)
        return bool(self._buffer)

    def _read_name(self, parts: list[Part]) -> bool:
        """Read a name before its arguments, as newer Mistral models write calls."""
        head, brace, _ = self._buffer.partition("{")
        name = self._prefixed_name.fullmatch(head)
        if brace and name:
            self._note_call()
            parts.append(CallOpened(name[1]))
            self._value = JsonValue()
            self._step = self._read_arguments
            self._buffer = self._buffer[len(head) :]
        elif brace or len(head) > _MAX_NAME or not self._name_characters.fullmatch(head):
            self._fall_back("", parts)
        else:
            return False
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        value = self._value
        assert value is not None
        place = value.feed(self._buffer, 0)
        if place:
            parts.append(CallArguments(self._buffer[:place]))
        self._buffer = self._buffer[place:]
        self._settle(value.status, parts)
        return bool(self._buffer)

    def _settle(self, status: Status, parts: list[Part]) -> None:
        """Go on behind a call that has ended, or never was one."""
        if status is Status.OPEN:
            return
        is_done, self._object, self._value = status is Status.DONE, None, None
        if is_done:
            self._step = self._read_between if self._parallel else self._drop
        else:
            self._fall_back("", parts)

    def _note_call(self) -> None:
        self.num_calls += 1
        self._calls_in_region += 1
        self._attempt.clear()
        self._space.clear()

    def _drop(self, parts: list[Part]) -> bool:
        """Behind the one call that was allowed."""
        del parts
        self._buffer = ""
        return False

    def _enter_region(self, marker: str, *, is_marked: bool) -> None:
        self._step = self._read_between
        self._is_marked = is_marked
        self._calls_in_region = 0
        self._attempt.append(marker)

    def _leave_region(self) -> None:
        self._step = self._read_content
        self._attempt.clear()

    def _fall_back(self, rest: str, parts: list[Part]) -> None:
        """Make content of what no call has come of; between calls nothing but separators is lost."""
        text = "".join(self._attempt) + rest
        if self._calls_in_region and not text.strip(SPACE + "[],;"):
            text = ""
        self._attempt.clear()
        self._object = self._value = None
        self._calls_in_region = 0
        self._step = self._read_content
        self._add_content(text, parts)

    def _add_content(self, text: str, parts: list[Part]) -> None:
        body = text.rstrip()
        if body:
            parts.append(Content("".join(self._space) + body))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])
