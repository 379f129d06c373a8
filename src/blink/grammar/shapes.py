# SPDX-License-Identifier: Apache-2.0
"""What an object or an array must be like, as one conjunction; how two hold together, and what is not so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.language import ANY_TEXTS, NO_TEXTS, Language
from blink.grammar.nodes import ANYTHING, NOTHING, Node

_MAX_CLASSES = 64
_MAX_PREFIX = 4096
NameClasses = tuple[tuple[Language, Node], ...]


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """An object.

    listed: what the members of these names are, in the order in which they are written.
    rest: what the others are, by classes of names that have no name in common; together they are all names, and a
        listed name has no meaning in them.
    writes_rest: whether others are written beside listed ones.
    evaluated: the names that `unevaluatedProperties` does not speak of.
    """

    listed: Mapping[str, Node] = field(default_factory=dict[str, Node])
    required: Mapping[str, None] = field(default_factory=dict[str, None])
    rest: NameClasses = ((ANY_TEXTS, ANYTHING),)
    least: int = 0
    most: int | None = None
    writes_rest: bool = False
    evaluated: Language = NO_TEXTS

    def member(self, name: str) -> Node:
        """Return what a member of that name is."""
        if name in self.listed:
            return self.listed[name]
        return next(node for language, node in self.rest if language.matches(name))

    def __and__(self, other: ObjectShape) -> ObjectShape:
        names = dict.fromkeys([*self.listed, *other.listed])
        rest = [
            (both, node & beside)
            for language, node in self.rest
            for names_beside, beside in other.rest
            if not (both := language & names_beside).is_empty
        ]
        if len(rest) > _MAX_CLASSES:
            raise GrammarTooLargeError("too many patternProperties hold together")
        return ObjectShape(
            {name: self.member(name) & other.member(name) for name in names},
            {**self.required, **other.required},
            tuple(rest),
            max(self.least, other.least),
            _least_of(self.most, other.most),
            self.writes_rest or other.writes_rest,
            self.evaluated | other.evaluated,
        )

    def __hash__(self) -> int:
        return hash((tuple(self.listed.items()), tuple(self.required), self.rest, self.least, self.most))

    @property
    def size(self) -> int:
        """Return how much there is to look at."""
        return len(self.listed) + len(self.required) + len(self.rest)

    @property
    def is_impossible(self) -> bool:
        """Say whether it is plain that there is no such object."""
        if self.most is not None and max(self.least, len(self.required)) > self.most:
            return True
        return any(self.member(name) is NOTHING for name in self.required)

    def others(self) -> Iterator[ObjectShape]:
        """Return the objects that are not so, each for another reason."""
        for name in self.required:
            yield ObjectShape({name: NOTHING})
        for name, node in self.listed.items():
            if node is not ANYTHING:
                yield ObjectShape({name: ~node}, {name: None})
        if any(node is not ANYTHING for _, node in self.rest):
            raise GrammarError("'not' of additionalProperties, patternProperties or propertyNames is not supported")
        if self.least > 0:
            yield ObjectShape(most=self.least - 1)
        if self.most is not None:
            yield ObjectShape(least=self.most + 1)


def names_shape(names: Language, node: Node, others: Node = ANYTHING, *, writes_rest: bool = False) -> ObjectShape:
    """Return objects whose members of some names are of one kind, and those of all others of another."""
    classes = ((names, node), (ANY_TEXTS - names, others))
    return ObjectShape(rest=tuple(each for each in classes if not each[0].is_empty), writes_rest=writes_rest)


@dataclass(frozen=True, slots=True)
class Contained:
    """How many items of an array must be of a kind; most: None for no limit."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """An array: what its first items are, what the rest are, how many there are, and how many of them are of a kind.

    evaluated: how many of its first items `unevaluatedItems` does not speak of; None: of none.
    """

    prefix: tuple[Node, ...] = ()
    rest: Node = ANYTHING
    least: int = 0
    most: int | None = None
    is_unique: bool = False
    contained: tuple[Contained, ...] = ()
    evaluated: int | None = 0

    def item(self, index: int) -> Node:
        """Return what the item of an index is."""
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def __and__(self, other: ArrayShape) -> ArrayShape:
        count = max(len(self.prefix), len(other.prefix))
        evaluated = (self.evaluated, other.evaluated)
        return ArrayShape(
            tuple(self.item(index) & other.item(index) for index in range(count)),
            self.rest & other.rest,
            max(self.least, other.least),
            _least_of(self.most, other.most),
            self.is_unique or other.is_unique,
            tuple(dict.fromkeys((*self.contained, *other.contained))),
            None if None in evaluated else max(each or 0 for each in evaluated),
        )

    @property
    def size(self) -> int:
        """Return how much there is to look at."""
        return len(self.prefix) + len(self.contained)

    @property
    def is_impossible(self) -> bool:
        """Say whether it is plain that there is no such array."""
        if self.most is not None and self.least > self.most:
            return True
        return any(self.item(index) is NOTHING for index in range(min(self.least, len(self.prefix) + 1)))

    def others(self) -> Iterator[ArrayShape]:
        """Return the arrays that are not so, each for another reason."""
        for index, node in enumerate(self.prefix):
            if node is not ANYTHING:
                if index >= _MAX_PREFIX:
                    raise GrammarTooLargeError("'not' of too many prefixItems")
                yield ArrayShape((*(ANYTHING,) * index, ~node), least=index + 1)
        if self.rest is not ANYTHING:
            if self.prefix:
                raise GrammarError("'not' of items behind prefixItems is not supported")
            yield ArrayShape(contained=(Contained(~self.rest, 1, None),))
        if self.least > 0:
            yield ArrayShape(most=self.least - 1)
        if self.most is not None:
            yield ArrayShape(least=self.most + 1)
        if self.is_unique:
            raise GrammarError("'not' of uniqueItems is not supported")
        for each in self.contained:
            if each.least > 0:
                yield ArrayShape(contained=(replace(each, least=0, most=each.least - 1),))
            if each.most is not None:
                yield ArrayShape(contained=(Contained(each.node, each.most + 1, None),))


def _least_of(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)
