# SPDX-License-Identifier: Apache-2.0
"""From the growing text of a reply to the parts of its message: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blink.text.message.calls import CallParser
from blink.text.message.format_kinds import CallFormat, ReasoningFormat, Space
from blink.text.message.harmony import HarmonyParser
from blink.text.message.parts import CallOpened, Content, Part, Reading, Reasoning, merge
from blink.text.message.reasoning import ReasoningParser


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """How the replies to one request are to be read."""

    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool | None = None  # as the prompt leaves it
    include_reasoning: bool = True
    calls: CallFormat | None = None  # None: no tools are offered
    names: frozenset[str] = frozenset()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])  # of arguments
    parallel: bool = True
    num_earlier_calls: int = 0  # in the conversation
    is_named: bool = False  # the one function that must be called was named
    uses_harmony: bool = False  # the text is gpt-oss' format, with its marks
    needs_content: bool = False  # reasoning that no answer follows is the content too

    @property
    def reasoning_tags(self) -> tuple[str, str]:
        """Return the tags that reasoning begins and ends with; empty where it begins without one, or there is none."""
        form = self.reasoning
        if form is None or form.uses_harmony or self.is_reasoning_open is False:
            return "", ""
        return "" if self.is_reasoning_open or form.begins_inside else form.open, form.close

    def without_space(self) -> MessageForm:
        """Return the form by which the space around reasoning is dropped."""
        return self if self.reasoning is None else replace(self, reasoning=replace(self.reasoning, space=Space.DROPPED))


class MessageParser:
    """Parse the text of one reply."""

    def __init__(self, form: MessageForm) -> None:
        self._include_reasoning = form.include_reasoning
        self._lacks_content = form.needs_content
        self._unanswered: list[str] = []  # reasoning, while it lacks an answer
        self.repeats_reasoning = False  # in the content, at the end
        self._channels: HarmonyParser | None = None
        self._reasoning: ReasoningParser | None = None
        self._calls: CallParser | None = None
        if form.uses_harmony:
            self._channels = HarmonyParser(
                form.names if form.calls else None,
                parallel=form.parallel,
                has_reasoning=form.reasoning is not None,
                is_reasoning_open=form.is_reasoning_open,
            )
            return
        if form.reasoning:
            self._reasoning = ReasoningParser(form.reasoning, form.is_reasoning_open)
        if form.calls:
            self._calls = CallParser(form.calls, form.names, parallel=form.parallel, schemas=form.schemas)

    @property
    def num_calls(self) -> int:
        """Return how many calls have been opened."""
        reader = self._channels or self._calls
        return reader.num_calls if reader is not None else 0

    @property
    def is_reasoning(self) -> bool:
        """Say whether the text that comes next is reasoning."""
        reader = self._channels or self._reasoning
        return reader is not None and reader.is_inside

    @property
    def reading(self) -> Reading:
        """Return what the text that came last is."""
        if self._channels is not None:
            return self._channels.reading
        if self._reasoning is not None and self._reasoning.is_unsure:
            return Reading.UNSURE
        return Reading.TEXT if self._calls is None or self.is_reasoning else self._calls.reading

    def stays_with(self, text: str) -> bool:
        """Say whether all of a piece of text is certain to be what the text before it is."""
        if self._channels is not None:
            return self._channels.stays_with(text)
        if self._reasoning is not None and not self._reasoning.stays_with(text):
            return False
        return self._calls is None or self.is_reasoning or self._calls.stays_with(text)

    def push(self, text: str) -> list[Part]:
        """Return what the message has gained by a piece of text."""
        if self._channels is not None:
            return self._show(self._channels.push(text))
        if self._reasoning is None:
            return self._parse(text)
        return self._route(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        if self._channels is not None:
            return self._show(self._channels.finish())
        parts = self._route(self._reasoning.finish()) if self._reasoning is not None else []
        if self._calls is not None:
            parts += self._calls.finish()
        if self._lacks_content and self._unanswered and not any(map(_is_answer, parts)):
            self.repeats_reasoning = True
            parts.append(Content("".join(self._unanswered)))
        return merge(parts)

    def _parse(self, text: str) -> list[Part]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Content(text)] if text else []

    def _route(self, found: Iterable[Part]) -> list[Part]:
        parts: list[Part] = []
        for part in found:
            if isinstance(part, Content):
                parts += self._parse(part.text)
            else:
                parts += self._show([part])
        if self._lacks_content:
            self._lacks_content = not any(map(_is_answer, parts))
        return merge(parts)

    def _show(self, parts: list[Part]) -> list[Part]:
        if self._lacks_content:
            self._unanswered += [part.text for part in parts if isinstance(part, Reasoning)]
        return [part for part in parts if self._include_reasoning or not isinstance(part, Reasoning)]


def _is_answer(part: Part) -> bool:
    return isinstance(part, CallOpened) or (isinstance(part, Content) and bool(part.text.strip()))
