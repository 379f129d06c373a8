# SPDX-License-Identifier: Apache-2.0
"""Sets of JSON values, type by type, with the operations of sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from blink.grammar.budget import spend
from blink.grammar.errors import GrammarTooLargeError
from blink.grammar.language import ANY_TEXTS
from blink.grammar.nodes import NOTHING, value_node
from blink.grammar.numbers import Numbers, all_numbers, named, no_numbers, whole_numbers
from blink.grammar.shapes import ArrayShape, ObjectShape
from blink.grammar.strings import ALL_STRINGS, NO_STRINGS, Strings, named_strings

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_MAX_SHAPES = 1000
_Shape = TypeVar("_Shape", ObjectShape, ArrayShape)


@dataclass(frozen=True, slots=True)
class Form:
    """A set of JSON values."""

    null: bool
    booleans: frozenset[bool]
    numbers: Numbers
    strings: Strings
    arrays: tuple[ArrayShape, ...]
    objects: tuple[ObjectShape, ...]

    @property
    def is_empty(self) -> bool:
        """Say whether it is plain that there is no value."""
        return (
            not (self.null or self.booleans or self.arrays or self.objects)
            and self.numbers.is_empty
            and self.strings.is_empty
        )

    def __and__(self, other: Form) -> Form:
        return Form(
            self.null and other.null,
            self.booleans & other.booleans,
            self.numbers & other.numbers,
            self.strings & other.strings,
            _possible(one & two for one in self.arrays for two in other.arrays),
            _possible(one & two for one in self.objects for two in other.objects),
        )

    def __or__(self, other: Form) -> Form:
        return Form(
            self.null or other.null,
            self.booleans | other.booleans,
            self.numbers | other.numbers,
            self.strings | other.strings,
            _possible([*self.arrays, *other.arrays]),
            _possible([*self.objects, *other.objects]),
        )

    def others(self) -> Form:
        """Return the values that are not in the set."""
        return Form(
            not self.null,
            frozenset((True, False)) - self.booleans,
            self.numbers.others(),
            self.strings.others(),
            _others(self.arrays, ArrayShape(), lambda shape: shape.others()),
            _others(self.objects, ObjectShape(), lambda shape: shape.others()),
        )


def _possible(shapes: Iterable[_Shape]) -> tuple[_Shape, ...]:
    found: dict[_Shape, None] = {}
    for shape in shapes:
        spend(1 + shape.size // 8)
        if not shape.is_impossible:
            found[shape] = None
        if len(found) > _MAX_SHAPES:
            raise GrammarTooLargeError(f"more than {_MAX_SHAPES} kinds of objects or arrays stand for each other")
    return tuple(found)


def _others(
    shapes: tuple[_Shape, ...], any_shape: _Shape, others: Callable[[_Shape], Iterator[_Shape]]
) -> tuple[_Shape, ...]:
    found = (any_shape,)
    for shape in shapes:
        options = list(others(shape))
        found = _possible(one & two for one in found for two in options)
    return found


def any_form() -> Form:
    """Return all values."""
    return Form(True, frozenset((True, False)), all_numbers(), ALL_STRINGS, (ArrayShape(),), (ObjectShape(),))


def no_form() -> Form:
    """Return no value."""
    return Form(False, frozenset(), no_numbers(), NO_STRINGS, (), ())


def form_of_types(names: Iterable[str]) -> Form:
    """Return the values of some of TYPES."""
    found = no_form()
    everything = any_form()
    for name in names:
        found = found | _of_type(name, everything)
    return found


def _of_type(name: str, everything: Form) -> Form:
    nothing = no_form()
    if name == "object":
        return replace(nothing, objects=everything.objects)
    if name == "array":
        return replace(nothing, arrays=everything.arrays)
    if name == "string":
        return replace(nothing, strings=everything.strings)
    if name in ("number", "integer"):
        return replace(nothing, numbers=everything.numbers if name == "number" else whole_numbers())
    if name == "boolean":
        return replace(nothing, booleans=everything.booleans)
    return replace(nothing, null=True)


def form_of_values(values: Iterable[Any]) -> Form:
    """Return some values."""
    known = list(values)
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in known]
    return Form(
        any(value is None for value in known),
        frozenset(value for value in known if isinstance(value, bool)),
        named(value for value, is_one in zip(known, is_number, strict=True) if is_one),
        named_strings(value for value in known if isinstance(value, str)),
        _possible(_array_of(value) for value in known if isinstance(value, list)),
        _possible(_object_of(value) for value in known if isinstance(value, dict)),
    )


def _array_of(items: list[Any]) -> ArrayShape:
    return ArrayShape(tuple(value_node(item) for item in items), NOTHING, len(items), len(items))


def _object_of(members: dict[str, Any]) -> ObjectShape:
    listed = {name: value_node(value) for name, value in members.items()}
    return ObjectShape(listed, dict.fromkeys(members), ((ANY_TEXTS, NOTHING),))
