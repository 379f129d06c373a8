# SPDX-License-Identifier: Apache-2.0
"""Read one tool call whose arguments stand between tags, one by one and as text, while it grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from blink.structured_outputs import Parameters
from blink.text.message.argument_types import STRING, argument_types, quote, to_json
from blink.text.message.json_value import Status
from blink.text.message.markers import Markers
from blink.text.message.parts import CallArguments, CallOpened, Part
from blink.text.message.shapes import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What stands around a call's name and its arguments; structures are Shapes."""

    heads: tuple[str, ...]  # before the arguments
    keys: tuple[str, ...]  # before a value; a word in it says whether the value is a string
    close: str  # behind a value
    ends: tuple[str, ...]  # behind the arguments
    lines: bool = False  # a value stands on lines of its own
    written: Parameters  # how arguments are forced
    stops: tuple[str, ...] = ()  # what ends a value too, and stays
    outer: tuple[str, ...] = ()  # what ends the arguments too, and stays
    head_shapes: Shapes = field(init=False, compare=False)
    key_shapes: Shapes = field(init=False, compare=False)
    end_shapes: Shapes = field(init=False, compare=False)
    markers: Markers = field(init=False, compare=False)

    def __post_init__(self) -> None:
        outer = tuple(f"&{each}" for each in self.outer)
        found = (self.close, *self.stops)
        markers = (*found, *(f"\n{each}" for each in found)) if self.lines else found
        object.__setattr__(self, "head_shapes", Shapes(self.heads))
        object.__setattr__(self, "key_shapes", Shapes(self.keys))
        object.__setattr__(self, "end_shapes", Shapes((*self.ends, *outer)))
        object.__setattr__(self, "markers", Markers(markers))


class TaggedCall:
    """One call. It opens when its name is known."""

    def __init__(self, tags: Tags, names: Container[str] | None, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin before the name; `names`, if given, are those that make a call of it."""
        self.status = Status.OPEN
        self.is_opened = False
        self._tags = tags
        self._names = names
        self._schemas = schemas
        self._schema: Mapping[str, Any] = {}
        self._step: Callable[[str, int, list[Part]], int | None] = self._read_head
        self._types: frozenset[str] = STRING  # of the open value
        self._raw: list[str] = []  # of a value that is no string
        self._is_first = True

    def feed(self, text: str, place: int, parts: list[Part]) -> int:
        """Take the text from `place` on as far as it is certain, append what is new, and return where that ends."""
        while place < len(text) and self.status is Status.OPEN:
            after = self._step(text, place, parts)
            if after is None:
                break
            place = after
        return place

    def finish(self, parts: list[Part]) -> None:
        """Note that no more text comes: arguments that are whole are closed."""
        if self.is_opened and self.status is Status.OPEN and self._step == self._read_between:
            parts.append(CallArguments("}"))

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to belong to the call."""
        return self._step == self._read_value and "<" not in text

    def _read_head(self, text: str, place: int, parts: list[Part]) -> int | None:
        found = self._tags.head_shapes.match(text, place)
        if found is None:
            return self._wait(self._tags.head_shapes.may_begin(text, place), place)
        name = found["name"]
        if self._names is not None and name not in self._names:
            self.status = Status.BROKEN
            return place
        self.is_opened = True
        self._schema = self._schemas.get(name, {})
        self._step = self._read_between
        parts += [CallOpened(name), CallArguments("{")]
        return found.end()

    def _read_between(self, text: str, place: int, parts: list[Part]) -> int | None:
        """Read an argument's name, or the call's end."""
        if text[place].isspace():
            return place + 1
        keys, ends = self._tags.key_shapes, self._tags.end_shapes
        if found := keys.match(text, place):
            return self._begin_value(found, parts)
        if found := ends.match(text, place):
            parts.append(CallArguments("}"))
            self.status = Status.DONE
            return found.end()
        may_begin = keys.may_begin(text, place) or ends.may_begin(text, place)
        if not may_begin:
            parts.append(CallArguments("}"))
        return self._wait(may_begin, place)

    def _wait(self, may_begin: bool, place: int) -> int | None:
        if may_begin:
            return None
        self.status = Status.BROKEN
        return place

    def _begin_value(self, found: re.Match[str], parts: list[Part]) -> int:
        self._types = argument_types(self._schema, found["key"])
        word = found.groupdict().get("word")
        if word is not None:
            self._types = STRING if word == "true" else self._types - STRING
        before = "" if self._is_first else ", "
        self._is_first = False
        opening = '"' if self._types == STRING else ""
        parts.append(CallArguments(f"{before}{quote(found['key'])}: {opening}"))
        self._step = self._begin_line if self._tags.lines else self._read_value
        return found.end()

    def _begin_line(self, text: str, place: int, parts: list[Part]) -> int:
        del parts
        self._step = self._read_value
        # The value's line may be empty: then its end stands where it begins.
        return place + 1 if text[place] == "\n" else place

    def _read_value(self, text: str, place: int, parts: list[Part]) -> int | None:
        markers = self._tags.markers
        found = markers.search(text, place)
        end, behind = found or (markers.certain(text, place),) * 2
        self._add(text[place:end], parts)
        if found is not None:
            self._end_value(parts)
            marker = text[end:behind]
            return behind if marker.endswith(self._tags.close) else end + marker.startswith("\n")
        return end if end > place else None

    def _add(self, text: str, parts: list[Part]) -> None:
        if self._types != STRING:
            self._raw.append(text)
        elif text:
            parts.append(CallArguments(quote(text)[1:-1]))

    def _end_value(self, parts: list[Part]) -> None:
        parts.append(CallArguments('"' if self._types == STRING else to_json("".join(self._raw), self._types)))
        self._raw.clear()
        self._step = self._read_between
