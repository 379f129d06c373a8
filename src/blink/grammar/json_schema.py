# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as expressions. What is generated is always valid; what cannot be promised is refused by its keyword.

Members come in the order in which the schema declares them; see docs/json-schema.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.expression import (
    EMPTY,
    NEVER,
    Call,
    Escapes,
    Expression,
    Members,
    Regular,
    choice,
    series,
)
from blink.grammar.forms import Form, any_form
from blink.grammar.json_arrays import MAX_UNIQUE, write_counted, write_unique
from blink.grammar.json_text import BOOLEAN, NUMBER_RULE, Layout, string_literal
from blink.grammar.language import NO_TEXTS, texts
from blink.grammar.nodes import ANYTHING, NOTHING, Node
from blink.grammar.numbers import Numbers, all_numbers
from blink.grammar.readings import Reading
from blink.grammar.schema_forms import SchemaForms
from blink.grammar.shapes import ArrayShape, ObjectShape
from blink.grammar.strings import Strings, strings_of

_MAX_ITEMS = 4096  # of arrays whose length has bounds
_MAX_RULES = 20_000
_MAX_MEMBERS = 8000


class SchemaCompiler:
    """Compile one schema; `rules` then has what the expression calls, beside the layout's.

    Args:
        prefix: of the rules' names.
    """

    def __init__(self, schema: Any, layout: Layout, prefix: str = "") -> None:
        self.rules: dict[str, Expression] = {}
        self._layout = layout
        self._prefix = prefix
        self._forms = SchemaForms(schema)
        self._names: dict[Node | Numbers | Strings, str] = {}
        self._left: list[tuple[str, Node]] = []
        self._root = schema

    def compile(self) -> Expression:
        """Return the values that the schema allows; NEVER if none.

        Raises:
            GrammarError: it is malformed, or has a keyword that cannot be kept.
        """
        found = self.value(self._forms.node(self._root))
        while self._left:
            name, node = self._left.pop()
            self.rules[name] = self._write(self._forms.form(node, Reading.NARROW))
        return found

    def value(self, node: Node) -> Expression:
        """Return a value of a node."""
        if node is ANYTHING:
            return self._layout.any_value
        if node is NOTHING:
            return NEVER
        if node not in self._names:
            self._left.append((self._name(node), node))
        return Call(self._names[node])

    def _name(self, key: Node | Numbers | Strings) -> str:
        if len(self._names) >= _MAX_RULES:
            raise GrammarTooLargeError(f"it has more than {_MAX_RULES} parts, references resolved")
        return self._names.setdefault(key, f"{self._prefix}{len(self._names)}")

    def _write(self, form: Form) -> Expression:
        if form == any_form():
            return self._layout.any_value
        options: list[Expression] = []
        if form.null:
            options.append(self._layout.literal(None))
        if len(form.booleans) == 2:
            options.append(BOOLEAN)
        else:
            options += [self._layout.literal(value) for value in form.booleans]
        if form.numbers == all_numbers():
            options.append(Call(NUMBER_RULE))
        elif not form.numbers.is_empty:
            options.append(self._scalar(form.numbers))
        if not form.strings.is_empty:
            options.append(self._scalar(form.strings))
        options += [self._write_array(shape) for shape in form.arrays]
        options += [self._write_object(shape) for shape in form.objects]
        return choice(options)

    def _scalar(self, values: Numbers | Strings) -> Expression:
        """Return a rule of numbers or strings: many fields of one kind are one rule."""
        if values not in self._names:
            name = self._name(values)
            self.rules[name] = values.expression()
        return Call(self._names[values])

    def _write_object(self, shape: ObjectShape) -> Expression:
        if shape.most == 0:
            return self._layout.enclosed("{", (), "}")
        names = dict.fromkeys([*shape.listed, *shape.required])
        if len(names) > _MAX_MEMBERS:
            raise GrammarTooLargeError(f"an object may have {_MAX_MEMBERS} members that are declared")
        items: list[tuple[Expression, bool]] = []
        for name in names:
            is_required = name in shape.required
            node = shape.member(name)
            if node is NOTHING and not is_required:
                continue
            member = series(string_literal(name), self._layout.colon, self.value(node))
            items.append((member, is_required))
        others: Expression | None = None
        if shape.writes_rest or not names:
            others = choice(list(self._other_members(shape, names.keys())))
            others = None if others == NEVER else others
        if shape.least > len(items) + (others is not None):
            if others is None:
                return NEVER
            raise GrammarError("minProperties needs declared properties, as other names may repeat")
        layout = self._layout
        members = Members(tuple(items), layout.comma, others, shape.least, shape.most, layout.space)
        return series("{", layout.space, members, "}")

    def _other_members(self, shape: ObjectShape, names: Any) -> Iterator[Expression]:
        declared = texts(names) if shape.rest and names else NO_TEXTS
        for language, node in shape.rest:
            others = language - declared
            if node is NOTHING or others.is_empty:
                continue
            yield series(self._scalar(strings_of(others)), self._layout.colon, self.value(node))

    def _write_array(self, shape: ArrayShape) -> Expression:
        layout = self._layout
        least, most = shape.least, shape.most
        if max(least, most or 0) > _MAX_ITEMS:
            raise GrammarTooLargeError(f"arrays may have {_MAX_ITEMS} items if their number has bounds")
        inside: Expression
        if shape.is_unique and (most is None or most > 1):
            inside = self._write_unique(shape)
        elif shape.contained:
            inside = write_counted(shape, self.value, layout)
        else:
            inside = self._write_items(shape)
        return series("[", layout.space, inside, "]")

    def _write_items(self, shape: ArrayShape) -> Expression:
        least, most = shape.least, shape.most
        prefix = shape.prefix if most is None else shape.prefix[:most]
        layout = self._layout
        num_more = None if most is None else most - len(prefix)
        others = self.value(shape.rest) if num_more != 0 else NEVER
        if others == NEVER:
            num_more = 0
        if num_more == 0 and least > len(prefix):
            return NEVER
        if not prefix:
            return layout.list_of(others, least, num_more)
        num_least = max(least - len(prefix), 0)
        tail = layout.space
        if num_more != 0:
            more = series(layout.comma, layout.list_of(others, max(num_least, 1), num_more))
            tail = more if num_least else choice([tail, more])
        for index in range(len(prefix) - 1, -1, -1):
            more = series(layout.comma if index else EMPTY, self.value(prefix[index]), tail)
            tail = more if index < least else choice([layout.space if index else EMPTY, more])
        return tail

    def _write_unique(self, shape: ArrayShape) -> Expression:
        if shape.prefix or shape.contained:
            raise GrammarError("uniqueItems beside prefixItems or contains is not supported")
        form = self._forms.form(shape.rest, Reading.NARROW)
        if form.arrays or form.objects:
            raise GrammarError("uniqueItems is supported where items are strings, numbers, booleans or null")
        numbers, strings = form.numbers.distinct, form.strings.listed(MAX_UNIQUE)
        words = ["null"] * form.null + [json.dumps(value) for value in form.booleans]
        count = len(words) + numbers.count(MAX_UNIQUE) + (MAX_UNIQUE + 1 if strings is None else len(strings))
        # Each value in one way, so that those that are equal have equal bytes.
        value = choice([*words, Regular(numbers), form.strings.expression(Escapes.NEEDED)])
        return write_unique(shape, value, count, self._layout)
