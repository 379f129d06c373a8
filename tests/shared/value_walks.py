# SPDX-License-Identifier: Apache-2.0
"""JSON values of automata: whether one can be written, with its members in some order, and ones drawn at random."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

from automata import Place, PlainAutomaton
from json_schemas import exact_number

_MAX_STEPS, _MAX_STEPS_OF_ALL_ORDERS = 5000, 600


class TooManyOrdersError(Exception):
    """A value has more orders of members than are tried."""


def draw_values(automaton: PlainAutomaton, count: int, seed: int = 1) -> list[Any]:
    """Return the values, with exact numbers, of some random texts."""
    chance = random.Random(seed)
    drawn = [automaton.draw(chance, 60 if place % 2 else 5) for place in range(count)]
    return [json.loads(text, parse_float=exact_number) for text in drawn if text is not None]


def walks(automaton: PlainAutomaton, value: Any) -> bool:
    """Say whether some text of a value is let through: numbers and strings as encoders write them, no spaces."""
    if _Walker(automaton).walks(value):
        return True
    try:
        return _Walker(automaton, max_steps=_MAX_STEPS_OF_ALL_ORDERS, tries_all=True).walks(value)
    except TooManyOrdersError:
        return False


def without_undeclared(automaton: PlainAutomaton, value: Any) -> Any:
    """Return a value without the members whose names cannot be written, wherever in its object."""
    walker = _Walker(automaton, leaves_out=True)
    walker.walks(value)
    return walker.written_part(value)


class _Walker:
    """A search from place to place, each of which is known by what is left to be written.

    leaves_out: members may be left out; tries_all: orders, too, in which a member seems to come too late.
    """

    def __init__(
        self,
        automaton: PlainAutomaton,
        *,
        max_steps: int = _MAX_STEPS,
        leaves_out: bool = False,
        tries_all: bool = False,
    ) -> None:
        self._automaton = automaton
        self._max_steps = max_steps
        self._leaves_out = leaves_out
        self._tries_all = tries_all or leaves_out
        self._written: set[tuple[int, str]] = set()  # by object, the members whose names could be written
        self._known: dict[tuple[int, Place], tuple[Place, ...]] = {}
        self._known_names: dict[tuple[str, Place], Place | None] = {}  # as members' names are asked for many times
        self._num_steps = 0

    def walks(self, value: Any) -> bool:
        return any(self._automaton.may_end(place) for place in self._behind(value, self._automaton.start))

    def _count(self) -> None:
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            raise TooManyOrdersError

    def written_part(self, value: Any) -> Any:
        """Return a value without the members whose names could not be written."""
        if isinstance(value, list):
            return [self.written_part(item) for item in value]
        if isinstance(value, dict):
            members = [(name, item) for name, item in value.items() if (id(value), name) in self._written]
            return {name: self.written_part(item) for name, item in members}
        return value

    def _behind(self, value: Any, place: Place) -> tuple[Place, ...]:
        """Return the places to which texts of a value lead from a place."""
        key = (id(value), place)
        if key not in self._known:
            self._count()
            if isinstance(value, dict):
                found = self._members(value, tuple(value), self._take(place, b"{"), {})
            elif isinstance(value, list):
                found = self._items(value, self._take(place, b"["))
            else:
                found = [end for text in _texts_of(value) if (end := self._take(place, text)) is not None]
            self._known[key] = tuple(dict.fromkeys(found))
        return self._known[key]

    def _items(self, items: list[Any], place: Place | None) -> list[Place]:
        places = [] if place is None else [place]
        for index, item in enumerate(items):
            starts = [self._take(each, b"," if index else b"") for each in places]
            places = list(dict.fromkeys(end for each in starts if each for end in self._behind(item, each)))
        return [end for each in places if (end := self._take(each, b"]")) is not None]

    def _members(
        self,
        members: dict[str, Any],
        left: tuple[str, ...],
        place: Place | None,
        known: dict[tuple[tuple[str, ...], Place], list[Place]],
    ) -> list[Place]:
        """Return where an object ends if some of its members are left to be written."""
        if place is None:
            return []
        key = (() if self._leaves_out else left, place)
        if key in known:
            return known[key]
        self._count()
        known[key] = []
        found: dict[Place, None] = {}
        if (not left or self._leaves_out) and (end := self._take(place, b"}")):
            found[end] = None
        start = place if len(left) == len(members) else self._take(place, b",")
        starts = {name: at for name in left if (at := self._named(name, start))}
        self._written.update((id(members), name) for name in starts)
        for name, at in starts.items():
            rest = tuple(other for other in left if other != name)
            places = self._behind(members[name], at)
            for after in places:
                # Members come in an order: whoever may come now and not behind this one, must come before it.
                comma = self._take(after, b",")
                if self._tries_all or all(other == name or self._named(other, comma) for other in starts):
                    found.update(dict.fromkeys(self._members(members, rest, after, known)))
            if place in places:  # as in a map: whatever else is left may come behind it
                break
        known[key] = list(found)
        return known[key]

    def _named(self, name: str, place: Place | None) -> Place | None:
        """Return the place of a member's value; None: its name cannot be written here."""
        if place is None:
            return None
        if (name, place) not in self._known_names:
            ends = (self._take(place, text + b":") for text in _texts_of(name))
            self._known_names[name, place] = next((end for end in ends if end), None)
        return self._known_names[name, place]

    def _take(self, place: Place, text: bytes) -> Place | None:
        found: Place | None = place
        for byte in text:
            found = None if found is None else self._automaton.take(found, byte)
        return found


def _texts_of(value: Any) -> dict[bytes, None]:
    """Return the ways in which a value that holds no other is usually written."""
    texts = [json.dumps(value, ensure_ascii=is_ascii) for is_ascii in (False, True)]
    if isinstance(value, float):
        exact = Decimal(repr(value))
        texts.append(f"{exact:f}")
        if exact == int(exact):
            texts.append(str(int(exact)))
    return dict.fromkeys(text.encode("utf-8", "surrogatepass") for text in texts)
