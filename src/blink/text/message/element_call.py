# SPDX-License-Identifier: Apache-2.0
"""Read one tool call whose arguments are nested elements, while it grows; they are given out when it ends.

An element is text, or holds others: those of an array, or the members of an object. A name that comes twice makes an
array of its values, so no argument is certain before the call's end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blink.structured_outputs import Parameters
from blink.text.message.argument_types import STRING, item_schema, member_schema, quote, to_json, types_of
from blink.text.message.json_value import Status
from blink.text.message.markers import Markers
from blink.text.message.parts import CallArguments, CallOpened, Part
from blink.text.message.shapes import Shapes

_MAX_DEPTH = 128
_OBJECT = frozenset({"object"})
_MIXED_TEXT = "$text"  # the name of text beside elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """How such calls are written."""

    mark: str  # before each tag
    heads: tuple[str, ...]  # Shapes of what stands before the arguments
    end: str  # behind the arguments
    outer: tuple[str, ...]  # what ends the arguments too, and stays
    written: Parameters  # how arguments are forced
    head_shapes: Shapes = field(init=False, compare=False)
    markers: Markers = field(init=False, compare=False)
    tag: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_shapes", Shapes(self.heads))
        object.__setattr__(self, "markers", Markers((self.end, *self.outer)))
        object.__setattr__(self, "tag", re.compile(rf"{re.escape(self.mark)}<(/?)([^<>/\n][^<>\n]{{0,255}})>"))


class ElementCall:
    """One call. It opens when its name is known."""

    def __init__(self, elements: Elements, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin before the name."""
        self.status = Status.OPEN
        self.is_opened = False
        self._elements = elements
        self._schemas = schemas
        self._schema: Mapping[str, Any] = {}
        self._raw: list[str] = []

    def feed(self, text: str, place: int, parts: list[Part]) -> int:
        """Take the text from `place` on as far as it is certain, append what is new, and return where that ends."""
        if not self.is_opened:
            shapes = self._elements.head_shapes
            found = shapes.match(text, place)
            if found is None:
                if not shapes.may_begin(text, place):
                    self.status = Status.BROKEN
                return place
            self.is_opened = True
            self._schema = self._schemas.get(found["name"], {})
            parts.append(CallOpened(found["name"]))
            place = found.end()
        span = self._elements.markers.search(text, place)
        end, behind = span or (self._elements.markers.certain(text, place),) * 2
        self._raw.append(text[place:end])
        if span is None:
            return end
        self.finish(parts)
        self.status = Status.DONE
        return behind if text[end:behind] == self._elements.end else end

    def finish(self, parts: list[Part]) -> None:
        """Note that no more text comes: the elements that are whole are the arguments."""
        parts.append(CallArguments(_read("".join(self._raw), self._elements.tag, self._schema)))

    def stays_with(self, text: str) -> bool:
        """Say whether a piece of text is certain to belong to the call."""
        return self.is_opened and self._elements.markers.cannot_begin_in(text)


@dataclass(slots=True)
class _Element:
    """One that is open."""

    name: str
    schema: Any
    types: frozenset[str]
    texts: list[str] = field(default_factory=list[str])
    members: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # with their JSON

    @property
    def is_array(self) -> bool:
        return "array" in self.types and "object" not in self.types


def _read(raw: str, tag: re.Pattern[str], root: Mapping[str, Any]) -> str:
    """Return the JSON of the elements of a text, up to the first that is malformed."""
    stack, place = [_Element("", root, _OBJECT)], 0
    for found in tag.finditer(raw):
        stack[-1].texts.append(raw[place : found.start()])
        place = found.end()
        closes, name = found[1], found[2]
        if not closes:
            if len(stack) > _MAX_DEPTH:
                break
            stack.append(_open(name, stack[-1], root))
        elif name == stack[-1].name and len(stack) > 1:
            element = stack.pop()
            stack[-1].members.append((name, _write(element)))
        else:
            break
    return _write_object(stack[0].members)


def _open(name: str, within: _Element, root: Mapping[str, Any]) -> _Element:
    schema = item_schema(within.schema, root) if within.is_array else member_schema(within.schema, name, root)
    return _Element(name, schema, STRING if schema is None else types_of(schema, root))


def _write(element: _Element) -> str:
    text, types = "".join(element.texts), element.types
    if not element.members:
        if not text.strip() and types and types <= {"array", "object", "null"}:
            return "[]" if "array" in types else "{}"
        return to_json(text, types)
    if element.is_array:
        return f"[{', '.join(value for _, value in element.members)}]"
    return _write_object(element.members + ([(_MIXED_TEXT, quote(text))] if text.strip() else []))


def _write_object(members: list[tuple[str, str]]) -> str:
    values: dict[str, list[str]] = {}
    for name, value in members:
        values.setdefault(name, []).append(value)
    written = (each[0] if len(each) == 1 else f"[{', '.join(each)}]" for each in values.values())
    return f"{{{', '.join(f'{quote(name)}: {value}' for name, value in zip(values, written, strict=True))}}}"
