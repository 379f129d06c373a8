# SPDX-License-Identifier: Apache-2.0
"""JSON values of automata: whether one can be written, with its members in some order, and ones drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from automata import Place, PlainAutomaton
from json_schemas import exact_number

_MAX_STEPS = 50_000


def draw_values(automaton: PlainAutomaton, count: int, seed: int = 1) -> list[Any]:
    """Return the values, with exact numbers, of some random texts."""
    chance = random.Random(seed)
    drawn = [automaton.draw(chance, 60 if place % 2 else 5) for place in range(count)]
    return [json.loads(text, parse_float=exact_number) for text in drawn if text is not None]


def walks(automaton: PlainAutomaton, value: Any) -> bool:
    """Say whether some text of a value is let through: numbers and strings as encoders write them, no spaces."""
    return _Walker(automaton).walks(value)


class _Walker:
    def __init__(self, automaton: PlainAutomaton) -> None:
        self._automaton = automaton
        self._known: dict[tuple[int, Place], tuple[Place, ...]] = {}
        self._num_steps = 0

    def walks(self, value: Any) -> bool:
        return any(self._automaton.may_end(place) for place in self._behind(value, self._automaton.start))

    def _behind(self, value: Any, place: Place) -> tuple[Place, ...]:
        """Return the places to which texts of a value lead from a place."""
        key = (id(value), place)
        if key not in self._known:
            self._num_steps += 1
            assert self._num_steps < _MAX_STEPS, "too many orders of members"
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
        if not left:
            end = self._take(place, b"}")
            return [] if end is None else [end]
        if (left, place) in known:
            return known[left, place]
        start = place if len(left) == len(members) else self._take(place, b",")
        found: dict[Place, None] = {}
        for name in left:
            for value_start in self._names(name, start):
                rest = tuple(other for other in left if other != name)
                for after in self._behind(members[name], value_start):
                    found.update(dict.fromkeys(self._members(members, rest, after, known)))
        return known.setdefault((left, place), list(found))

    def _names(self, name: str, place: Place | None) -> Iterator[Place]:
        for text in _texts_of(name):
            end = None if place is None else self._take(place, text + b":")
            if end is not None:
                yield end

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
