# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as expressions. What is generated is always valid; what cannot be promised is refused by its keyword.

Members come in the order in which the schema declares them; see docs/json-schema.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
from blink.grammar.language import NO_TEXTS, Language, texts
from blink.grammar.literal import literal
from blink.grammar.members import MemberWriter
from blink.grammar.nodes import ANYTHING, NOTHING, Node
from blink.grammar.numbers import Numbers, all_numbers
from blink.grammar.readings import Reading
from blink.grammar.schema_forms import SchemaForms
from blink.grammar.shapes import ArrayShape, ObjectShape
from blink.grammar.strings import Strings, strings_of
from blink.structured_outputs import Parameters

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
        self._write_rules()
        return found

    def compile_members(self, parameters: Parameters) -> Expression:
        """Return the objects that the schema allows, their members written one by one.

        Raises:
            GrammarError: it is malformed, or has a keyword that cannot be kept.
        """
        form = self.form(self._forms.node(self._root))
        writer = MemberWriter(self, parameters)
        found = choice(
            [self.members(shape, writer.member, writer.other, literal(parameters.separator)) for shape in form.objects]
        )
        self._write_rules()
        return found

    def form(self, node: Node) -> Form:
        """Return the values of a node."""
        return self._forms.form(node, Reading.NARROW)

    def rule(self, name: str, expression: Expression) -> Expression:
        """Return the call of a rule that is the same for all schemas."""
        self.rules[name] = expression
        return Call(name)

    def _write_rules(self) -> None:
        while self._left:
            name, node = self._left.pop()
            self.rules[name] = self.write(self.form(node))

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

    def write(self, form: Form) -> Expression:
        """Return the values of a form."""
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
        layout = self._layout
        if shape.most == 0:
            return layout.enclosed("{", (), "}")

        def member(name: str, node: Node) -> Expression:
            return series(string_literal(name), layout.colon, self.value(node))

        def other(names: Language, node: Node) -> Expression:
            return series(self._scalar(strings_of(names)), layout.colon, self.value(node))

        members = self.members(shape, member, other, layout.comma, layout.space)
        return members if members is NEVER else series("{", layout.space, members, "}")

    def members(
        self,
        shape: ObjectShape,
        member: Callable[[str, Node], Expression],
        other: Callable[[Language, Node], Expression],
        separator: Expression = EMPTY,
        behind: Expression = EMPTY,
    ) -> Expression:
        """Return an object's members, each as it is written; NEVER if there cannot be enough of them.

        Args:
            member: writes one that is declared.
            other: writes those of some names.
            separator: between two.
            behind: behind the last.
        """
        if shape.most == 0:
            return EMPTY
        names = dict.fromkeys([*shape.listed, *shape.required])
        if len(names) > _MAX_MEMBERS:
            raise GrammarTooLargeError(f"an object may have {_MAX_MEMBERS} members that are declared")
        items = [
            (member(name, node), name in shape.required)
            for name in names
            if (node := shape.member(name)) is not NOTHING or name in shape.required
        ]
        others: Expression | None = None
        if shape.writes_rest or not names:
            declared = texts(names) if shape.rest and names else NO_TEXTS
            classes = [(language - declared, node) for language, node in shape.rest if node is not NOTHING]
            found = [other(language, node) for language, node in classes if not language.is_empty]
            found = [each for each in found if each is not NEVER]
            others = choice(found) if found else None
        if shape.least > len(items) + (others is not None):
            if others is None:
                return NEVER
            raise GrammarError("minProperties needs declared properties, as other names may repeat")
        return Members(tuple(items), separator, others, shape.least, shape.most, behind)

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
