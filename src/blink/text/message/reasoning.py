# SPDX-License-Identifier: Apache-2.0
"""Tell reasoning from the answer after it while a message grows, to the letter but for what its format drops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from blink.text.message.format_kinds import ReasoningFormat, Space
from blink.text.message.markers import Markers
from blink.text.message.parts import Content, Part, Reasoning, merge

_TAIL_CHARS = 256
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates


def is_reasoning_open(prompt: str, form: ReasoningFormat, begun: str = "") -> bool | None:
    """Say whether a prompt leaves its reply inside (true) or behind (false) reasoning; None if it says nothing.

    `begun` is what there is of the message, where one is to be continued.
    """
    tail = prompt[-_TAIL_CHARS:].rstrip()
    if tail.endswith(tuple(tag.rstrip() for tag in form.opens)):
        return True
    if tail.endswith(form.closes):
        return False
    last_open, last_close = (max(map(begun.rfind, tags)) for tags in (form.opens, form.closes))
    return True if last_open > last_close else None


def as_prompted(form: ReasoningFormat, prompt: str) -> ReasoningFormat:
    """Return the format with the pair of tags first that a prompt has begun, of those that a model has."""
    tail = prompt[-_TAIL_CHARS:].rstrip()
    pairs = list(zip(form.opens, form.closes, strict=False))
    begun = next((pair for pair in pairs if tail.endswith(pair[0].rstrip())), pairs[0])
    if begun == pairs[0]:
        return form
    opens, closes = (tuple(tag for tag in tags if tag not in begun) for tags in (form.opens, form.closes))
    return replace(form, open=begun[0], close=begun[1], other_opens=opens, other_closes=closes)


def is_switched_off(variables: Mapping[str, Any]) -> bool:
    """Say whether a request's variables tell its chat template that the model shall not reason."""
    return any(variables.get(name) is not None and not variables[name] for name in _SWITCHES)


class ReasoningParser:
    """Split the text of one message."""

    def __init__(self, form: ReasoningFormat, is_open: bool | None) -> None:
        """Begin as the prompt leaves it (see is_reasoning_open)."""
        self._form = form
        self._begins_inside = form.begins_inside or is_open is True
        self._opens = Markers(form.opens)
        self._starts = Markers(form.opens if self._begins_inside else (*form.opens, *form.closes))
        self._close = Markers((*form.closes, *form.ends))
        # Of tags within the answer these are no part of it.
        marks = (*form.answer_tags, *(f"\n{tag}" for tag in form.answer_tags[1:]))
        self._answer_marks = Markers((*marks, *form.opens, *form.closes) if form.reopens else marks)
        self._buffer = ""
        self._space: list[str] = []  # at the end of reasoning
        self._is_leading = False  # what is dropped of the space at the beginning is not yet over
        self._step: Callable[[list[Part]], bool] = self._read_content if is_open is False else self._begin
        if form.is_content and is_open is not False:
            self._step = self._begin_content

    @property
    def is_inside(self) -> bool:
        """Say whether the text that comes next is reasoning."""
        return self._step == self._read_reasoning or (self._step == self._begin and self._begins_inside)

    @property
    def is_unsure(self) -> bool:
        """Say whether the text so far may be the beginning of a tag, other than that behind reasoning."""
        return self._step != self._read_reasoning and bool(self._buffer)

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to be what the text before it is."""
        if self._step == self._read_reasoning:
            return not self._buffer and self._close.cannot_begin_in(text)
        return self._step == self._read_content and self._answer_marks.cannot_begin_in(text)

    def push(self, text: str) -> list[Part]:
        """Return what the message has gained by a piece of text."""
        parts: list[Part] = []
        self._buffer += text
        while self._buffer and self._step(parts):
            pass
        return merge(parts)

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        parts: list[Part] = []
        if self._step == self._begin_content:
            parts.append(Content(self._form.open))
        elif self._step in (self._begin, self._open):
            self._pass_start()
        rest, self._buffer = self._buffer, ""
        if self.is_inside:
            self._add_reasoning(rest, parts)
        else:
            self._add_content(rest, parts)
        return merge(parts)

    def _begin(self, parts: list[Part]) -> bool:
        """Pass the opening tag, if there is one, or a closing tag of reasoning that the prompt has begun."""
        del parts
        if self._starts.may_grow(self._buffer.lstrip()):
            return False
        self._pass_start()
        return True

    def _pass_start(self) -> None:
        head = self._buffer.lstrip()
        length = self._starts.match(head)
        is_inside = self._begins_inside
        if length:
            is_inside = head.startswith(self._form.opens)
            self._buffer = head[length:]
        self._is_leading = is_inside or bool(length)
        self._step = self._read_reasoning if is_inside else self._read_content

    def _open(self, parts: list[Part]) -> bool:
        """Pass an opening tag within the answer."""
        del parts
        if self._opens.may_grow(self._buffer):
            return False
        self._pass_start()
        return True

    def _read_reasoning(self, parts: list[Part]) -> bool:
        found = self._close.search(self._buffer)
        certain, end = found or (self._close.certain(self._buffer),) * 2
        self._add_reasoning(self._buffer[:certain], parts)
        if found and self._buffer[certain:end] in self._form.ends:
            end = certain
        self._buffer = self._buffer[end:]
        if found:
            self._space.clear()
            self._is_leading, self._step = True, self._read_content
        return found is not None

    def _add_reasoning(self, text: str, parts: list[Part]) -> None:
        if self._form.space is not Space.KEPT:
            text = self._without_space(text)
        if text:
            self._is_leading = False
            parts.append(Reasoning(text))

    def _without_space(self, text: str) -> str:
        """Return text with the space that stood before it, and without that at its end, which waits."""
        body = text.rstrip()
        whole = "".join(self._space) + body
        if body:
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])
        if not body:
            return ""
        return whole.lstrip() if self._is_leading and self._form.space is Space.DROPPED else whole

    def _begin_content(self, parts: list[Part]) -> bool:
        """At the beginning of reasoning that is content."""
        head = self._buffer.lstrip()
        if len(head) < len(self._form.open) and self._form.open.startswith(head):
            return False
        if not head.startswith(self._form.open):
            parts.append(Content(self._form.open))
        self._step = self._read_content
        return True

    def _read_content(self, parts: list[Part]) -> bool:
        found = self._answer_marks.search(self._buffer)
        certain, end = found or (self._answer_marks.certain(self._buffer),) * 2
        text, mark = self._buffer[:certain], self._buffer[certain:end]
        self._add_content(text, parts)
        if mark in self._form.opens:
            self._buffer, self._step = self._buffer[certain:], self._open
        else:
            self._buffer = self._buffer[end:]
        return found is not None

    def _add_content(self, text: str, parts: list[Part]) -> None:
        if self._is_leading and self._form.space is Space.DROPPED:
            text = text.lstrip()
        if text:
            self._is_leading = False
            parts.append(Content(text))
