# SPDX-License-Identifier: Apache-2.0
"""Tell tool calls from content while a message grows. Nothing that a model writes is an error.

What looks like a call and is none becomes content. A call that has been opened stays: its arguments may be malformed.
The parts are the same however the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

from blink.text.message.call_object import SPACE, CallObject
from blink.text.message.element_call import ElementCall
from blink.text.message.format_kinds import CallFormat
from blink.text.message.json_value import Status
from blink.text.message.literal_call import LiteralCall
from blink.text.message.markers import Markers
from blink.text.message.named_call import NamedCall
from blink.text.message.parts import Content, Part, Reading, merge
from blink.text.message.tagged_call import TaggedCall

_PIECE_CHARS = 1024
_NO_SCHEMAS: Mapping[str, Mapping[str, Any]] = {}


class CallReader(Protocol):
    """What reads one call."""

    @property
    def status(self) -> Status: ...
    @property
    def is_opened(self) -> bool: ...
    def feed(self, text: str, place: int, parts: list[Part]) -> int: ...
    def finish(self, parts: list[Part]) -> None: ...
    def stays_with(self, text: str) -> bool: ...


class CallParser:
    """Parse the text of one message in a format."""

    def __init__(
        self,
        form: CallFormat,
        names: Container[str],
        *,
        parallel: bool = True,
        schemas: Mapping[str, Mapping[str, Any]] = _NO_SCHEMAS,
    ) -> None:
        """Expect calls of `names`: what stands without a marker is a call only if it has one of these.

        schemas: of the arguments, by the functions' names; they tell what is text from what is JSON.
        """
        self.num_calls = 0
        self._form = form
        self._names = names
        self._schemas = schemas
        self._parallel = parallel
        self._opens = Markers((*form.opens, *form.unmarked, *form.hidden))
        self._closes = Markers((*form.opens, *form.between, *form.closes))
        self._gaps = SPACE + ("[]" if form.elements is None else "")  # whose marks begin with a bracket
        self._step: Callable[[list[Part]], bool] = self._begin if form.is_bare else self._read_content
        self._buffer = ""
        self._attempt: list[str] = []  # what becomes content, should no call come of it
        self._space: list[str] = []  # at the content's end: dropped before calls
        self._has_words = False  # the content since the last call
        self._call: CallReader | None = None
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
        if self._call is not None:
            return self._call.is_opened and self._call.stays_with(text)
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
        if self._call is not None and self._call.is_opened:
            self._call.finish(parts)
        elif self._step != self._drop and not (self._step == self._read_between and self._calls_in_region):
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
            self._enter_region("", is_marked=False) if first[0] in self._form.bare_starts else self._leave_region()
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
        if marker in self._form.hidden:
            return True
        if marker in self._form.unmarked:
            self._buffer = marker + self._buffer  # it is the call's own
            self._enter_region("", is_marked=False)
        else:
            self._enter_region(marker, is_marked=True)
        return True

    def _read_between(self, parts: list[Part]) -> bool:
        """Inside a region of calls, before a call or behind one."""
        buffer = self._buffer
        length = self._closes.match(buffer)
        if length:
            self._cross(buffer[:length])
        elif buffer[0] in self._gaps or (buffer[0] in ",;" and self._calls_in_region):
            if self._closes.may_begin(buffer):
                return False
            length = 1
            self._attempt.append(buffer[0])
        elif self._closes.may_begin(buffer):
            return False
        elif (call := self._open_call(buffer[0])) is not None:
            self._call = call
            self._step = self._read_call
        else:
            self._fall_back("", parts)
        self._buffer = buffer[length:]
        return True

    def _open_call(self, first: str) -> CallReader | None:
        """Return what reads a call that begins with a character, None if none does."""
        form = self._form
        names = None if self._is_marked and not form.checks_names else self._names
        if first == "{" and (self._is_marked or "{" in form.bare_starts) and not form.has_named_objects:
            return CallObject(names)
        if form.tags is not None:
            return TaggedCall(form.tags, names, self._schemas)
        if form.literals is not None:
            return LiteralCall(form.literals, names)
        if form.elements is not None:
            return ElementCall(form.elements, self._schemas)
        return NamedCall(form.head_shapes) if form.heads and self._is_marked else None

    def _cross(self, marker: str) -> None:
        """Pass a marker inside a region: a closing one ends it."""
        if marker in self._form.between:
            self._attempt += [] if self._calls_in_region else [marker]
        elif marker in self._form.closes and self._calls_in_region:
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

    def _read_call(self, parts: list[Part]) -> bool:
        call = self._call
        assert call is not None
        was_opened, found = call.is_opened, list[Part]()
        place = call.feed(self._buffer, 0, found)
        if call.is_opened and not was_opened:
            self._note_call()
        parts += found
        if not call.is_opened:
            self._attempt.append(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if call.status is Status.OPEN:
            return False
        self._call = None
        if call.status is Status.DONE or (call.is_opened and self._buffer.startswith("<")):
            self._step = self._read_between if self._parallel else self._drop
        else:
            # Without a marker before it, the first character cannot begin a call again.
            rest = self._buffer[:1] if not call.is_opened and not any(self._attempt) else ""
            self._buffer = self._buffer[len(rest) :]
            self._fall_back(rest, parts)
        return bool(self._buffer)

    def _note_call(self) -> None:
        self.num_calls += 1
        self._calls_in_region += 1
        self._attempt.clear()
        self._space.clear()
        self._has_words = False

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
        text = "".join(self._attempt)
        if self._calls_in_region and not text.strip(SPACE + "[],;"):
            text = ""
        self._attempt.clear()
        self._call = None
        self._calls_in_region = 0
        self._step = self._read_content
        self._add_content(text + rest, parts)

    def _add_content(self, text: str, parts: list[Part]) -> None:
        body = text.rstrip()
        self._has_words |= bool(body)
        if self._form.keeps_space and self._has_words:
            body = text
        if body:
            parts.append(Content("".join(self._space) + body))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])
