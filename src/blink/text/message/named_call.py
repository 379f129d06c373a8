# SPDX-License-Identifier: Apache-2.0
"""Read one tool call written as a name and then the JSON of its arguments, while it grows."""

from __future__ import annotations

from blink.text.message.json_value import JsonValue, Status
from blink.text.message.parts import CallArguments, CallOpened, Part
from blink.text.message.shapes import Shapes


class NamedCall:
    """One call. It opens when its arguments begin."""

    def __init__(self, heads: Shapes) -> None:
        """Begin before the name."""
        self.status = Status.OPEN
        self._heads = heads
        self._value: JsonValue | None = None

    @property
    def is_opened(self) -> bool:
        """Say whether its name is known."""
        return self._value is not None

    def feed(self, text: str, place: int, parts: list[Part]) -> int:
        """Take the text from `place` on as far as it is certain, append what is new, and return where that ends."""
        if self._value is None:
            found = self._heads.match(text, place)
            if found is None:
                if not self._heads.may_begin(text, place):
                    self.status = Status.BROKEN
                return place
            parts.append(CallOpened(found["name"]))
            self._value = JsonValue()
            place = found.end()
        end = self._value.feed(text, place)
        if end > place:
            parts.append(CallArguments(text[place:end]))
        self.status = self._value.status
        return end

    def finish(self, parts: list[Part]) -> None:
        """Note that no more text comes."""

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to belong to the call."""
        return self.is_opened and not any(closer in text for closer in "}]")
