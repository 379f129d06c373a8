# SPDX-License-Identifier: Apache-2.0
"""Tell calls from the text around them while both grow, to the letter: stop strings end text, not calls."""

from __future__ import annotations

from typing import NamedTuple

from blink.text.message.parser import MessageForm, MessageParser
from blink.text.message.parts import Content, Reading


class Passage(NamedTuple):
    """A piece of what the model writes."""

    text: str
    is_call: bool  # of a call, with the markers around it


class Passages:
    """Cut the text of one reply; holds back what may still become either."""

    def __init__(self, form: MessageForm) -> None:
        self._parser = MessageParser(form)
        self._held = ""
        self._is_inside = False  # of a call

    def push(self, text: str) -> list[Passage]:
        """Return what is certain after a piece of text."""
        pieces = [text] if not self._held and self._parser.stays_with(text) else text
        return [passage for piece in pieces if (passage := self._take(piece)) is not None]

    def finish(self) -> list[Passage]:
        """Return what was held back, at the end of the text: no call has come of it."""
        held, self._held = self._held, ""
        return [Passage(held, False)] if held else []

    def _take(self, piece: str) -> Passage | None:
        parts = self._parser.push(piece)
        reading, was_inside = self._parser.reading, self._is_inside
        self._is_inside = reading is Reading.CALL
        self._held += piece
        if any(isinstance(part, Content) for part in parts):
            is_call = False
        elif was_inside or self._is_inside:  # the last of its marker belongs to a call
            is_call = True
        elif reading is Reading.UNSURE:
            return None
        else:
            is_call = False
        passage, self._held = Passage(self._held, is_call), ""
        return passage
