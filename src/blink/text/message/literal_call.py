# SPDX-License-Identifier: Apache-2.0
"""Read one tool call whose arguments follow its name in another notation than JSON's, while it grows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from blink.structured_outputs import Parameters
from blink.text.message.json_value import Status
from blink.text.message.literals import LiteralObject, Notation
from blink.text.message.parts import CallArguments, CallOpened, Part
from blink.text.message.shapes import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """How such calls are written."""

    heads: tuple[str, ...]  # Shapes of what stands before the arguments' opening bracket
    notation: Notation
    written: Parameters  # how arguments are forced
    head_shapes: Shapes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_shapes", Shapes(self.heads))


class LiteralCall:
    """One call. It opens when its arguments begin."""

    def __init__(self, literals: Literals, names: Container[str] | None) -> None:
        """Begin before the name; `names`, if given, are those that make a call of it."""
        self.status = Status.OPEN
        self._literals = literals
        self._names = names
        self._value: LiteralObject | None = None

    @property
    def is_opened(self) -> bool:
        """Say whether its name is known."""
        return self._value is not None

    def feed(self, text: str, place: int, parts: list[Part]) -> int:
        """Take the text from `place` on as far as it is certain, append what is new, and return where that ends."""
        if self._value is None:
            shapes = self._literals.head_shapes
            found = shapes.match(text, place)
            if found is None or (self._names is not None and found["name"] not in self._names):
                if found is not None or not shapes.may_begin(text, place):
                    self.status = Status.BROKEN
                return place
            parts.append(CallOpened(found["name"]))
            self._value = LiteralObject(self._literals.notation)
            place = found.end()
        end, written = self._value.feed(text, place)
        if written:
            parts.append(CallArguments(written))
        self.status = self._value.status
        return end

    def finish(self, parts: list[Part]) -> None:
        """Note that no more text comes."""

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to belong to the call."""
        return self.is_opened and text.isalnum()
