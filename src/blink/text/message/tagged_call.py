# SPDX-License-Identifier: Apache-2.0
"""Read one tool call whose arguments stand between tags, one by one and as text, while it grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from blink.structured_outputs import Parameters
from blink.text.message.argument_types import ANY, STRING, argument_types, quote, to_json, unwrap
from blink.text.message.json_value import Status
from blink.text.message.markers import Markers
from blink.text.message.parts import CallArguments, CallOpened, Part
from blink.text.message.shapes import Shapes

_STRING_WORDS = ("true", "string")  # said of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What stands around a call's name and its arguments; structures are Shapes."""

    heads: tuple[str, ...]  # before the arguments
    keys: tuple[str, ...]  # before a value; a word in it says whether the value is a string
    close: str  # behind a value
    ends: tuple[str, ...]  # behind the arguments
    lines: bool = False  # a value stands on lines of its own
    verbatim: tuple[str, str] | None = None  # what may stand around a value that holds anything else
    written: Parameters  # how arguments are forced
    wrappers: tuple[str, ...] = ()  # names that the one argument may have which is the object of all
    stops: tuple[str, ...] = ()  # what ends a value too, and stays
    outer: tuple[str, ...] = ()  # what ends the arguments too, and stays
    tells_types: bool = field(init=False)  # a word in keys tells strings from other values
    head_shapes: Shapes = field(init=False, compare=False)
    key_shapes: Shapes = field(init=False, compare=False)
    end_shapes: Shapes = field(init=False, compare=False)
    markers: Markers = field(init=False, compare=False)
    verbatim_end: Markers = field(init=False, compare=False)

    def __post_init__(self) -> None:
        outer = tuple(f"&{each}" for each in self.outer)
        found = (self.close, *self.stops)
        markers = (*found, *(f"\n{each}" for each in found)) if self.lines else found
        object.__setattr__(self, "tells_types", any("%w" in key for key in self.keys))
        object.__setattr__(self, "head_shapes", Shapes(self.heads))
        object.__setattr__(self, "key_shapes", Shapes(self.keys))
        object.__setattr__(self, "end_shapes", Shapes((*self.ends, *outer)))
        object.__setattr__(self, "markers", Markers(markers))
        object.__setattr__(self, "verbatim_end", Markers(self.verbatim[1:] if self.verbatim else ()))


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
        self._ends = tags.markers  # of the open value
        self._raw: list[str] = []  # of a value that is no string
        self._is_first = True
        self._wrapper = ""  # the name of what may be the object of all arguments
        self._wrapped: tuple[str, str] = "", ""  # that as it is, and as JSON

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
            self._end(parts)

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to belong to the call."""
        return self._step == self._read_value and self._ends.cannot_begin_in(text)

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
            self._end(parts)
            self.status = Status.DONE
            return found.end()
        may_begin = keys.may_begin(text, place) or ends.may_begin(text, place)
        if not may_begin:
            self._end(parts)
        return self._wait(may_begin, place)

    def _end(self, parts: list[Part]) -> None:
        """Close the arguments."""
        text, written = self._wrapped
        inside = unwrap(text, self._schema) or f"{quote(self._wrapper)}: {written}" if self._wrapper else ""
        parts.append(CallArguments(inside + "}"))

    def _wait(self, may_begin: bool, place: int) -> int | None:
        if may_begin:
            return None
        self.status = Status.BROKEN
        return place

    def _begin_value(self, found: re.Match[str], parts: list[Part]) -> int:
        self._types = self._types_of(found["key"], found.groupdict().get("word"))
        self._write_key(found["key"], parts)
        self._ends = self._tags.markers
        self._step = self._begin_line if self._tags.lines else self._read_value
        if self._tags.verbatim:
            self._step = self._begin_verbatim
        return found.end()

    def _write_key(self, key: str, parts: list[Part]) -> None:
        if self._is_first and key in self._tags.wrappers and argument_types(self._schema, key) is None:
            self._wrapper = key
        else:
            if self._wrapper:
                parts.append(CallArguments(f"{quote(self._wrapper)}: {self._wrapped[1]}"))
                self._wrapper = ""
            before = "" if self._is_first else ", "
            opening = '"' if self._types == STRING else ""
            parts.append(CallArguments(f"{before}{quote(key)}: {opening}"))
        self._is_first = False

    def _types_of(self, key: str, word: str | None) -> frozenset[str]:
        """Return the types of a value by its schema and what the model says of it."""
        types = argument_types(self._schema, key)
        if word in _STRING_WORDS:
            return types if types and "string" not in types else STRING
        if self._tags.tells_types:
            return (types or ANY) - STRING or types or ANY
        return STRING if types is None else types

    def _begin_line(self, text: str, place: int, parts: list[Part]) -> int:
        del parts
        self._step = self._read_value
        # The value's line may be empty: then its end stands where it begins.
        return place + 1 if text[place] == "\n" else place

    def _begin_verbatim(self, text: str, place: int, parts: list[Part]) -> int | None:
        """Pass what stands before a value that holds anything but its end."""
        del parts
        assert self._tags.verbatim is not None
        opening = self._tags.verbatim[0]
        rest = text[place : place + len(opening)]
        if rest != opening and opening.startswith(rest):
            return None
        self._step = self._read_value
        if rest != opening:
            return place
        self._ends = self._tags.verbatim_end
        return place + len(opening)

    def _read_value(self, text: str, place: int, parts: list[Part]) -> int | None:
        found = self._ends.search(text, place)
        end, behind = found or (self._ends.certain(text, place),) * 2
        self._add(text[place:end], parts)
        if found is not None:
            self._end_value(parts)
            marker = text[end:behind]
            return behind if marker.endswith(self._tags.close) else end + marker.startswith("\n")
        return end if end > place else None

    def _add(self, text: str, parts: list[Part]) -> None:
        if self._types != STRING or self._wrapper:
            self._raw.append(text)
        elif text:
            parts.append(CallArguments(quote(text)[1:-1]))

    def _end_value(self, parts: list[Part]) -> None:
        text = "".join(self._raw)
        if self._wrapper:
            self._wrapped = text, to_json(text, self._types)
        else:
            parts.append(CallArguments('"' if self._types == STRING else to_json(text, self._types)))
        self._raw.clear()
        self._step = self._read_between
