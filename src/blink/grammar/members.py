# SPDX-License-Identifier: Apache-2.0
"""Members of an object that are written one by one, strings as their text."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Protocol

from blink.grammar.errors import GrammarError
from blink.grammar.expression import (
    NEVER,
    Chars,
    Expression,
    Regular,
    Repeat,
    choice,
    complement,
    series,
    union,
)
from blink.grammar.forms import Form, any_form, form_of_types, no_form
from blink.grammar.language import ANY_TEXTS, Language
from blink.grammar.literal import literal
from blink.grammar.nodes import ANYTHING, Node
from blink.grammar.numbers import whole_numbers
from blink.grammar.pattern import pattern_language
from blink.grammar.strings import ALL_STRINGS, NO_STRINGS, Part
from blink.structured_outputs import Parameters

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"  # of a member that is not declared
_UNWRITABLE = frozenset('<>"\n')  # in a declared name
_MAX_NAME = 256
_MAX_COUNTED = 200  # characters of a text that are counted together with what it must not hold
_SPACE = r"[ \t\r\n]*"
# Texts that are read as values of other types than strings, where these are allowed beside strings: whole ones,
READ_AS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"[+-]?[0-9]+(?:\.0*)?",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
READ_AS_FROM = {"object": "{", "array": "["}  # and those that begin so.
_PATTERNS = READ_AS | {name: rf"\{first}(?:[^{{]|\{{)*" for name, first in READ_AS_FROM.items()}
_TEXT_RULE = "any text and "


class Compiler(Protocol):
    """What writes JSON (blink.grammar.json_schema)."""

    def form(self, node: Node) -> Form: ...
    def value(self, node: Node) -> Expression: ...
    def write(self, form: Form) -> Expression: ...
    def rule(self, name: str, expression: Expression) -> Expression: ...


class MemberWriter:
    """Writes the members of objects."""

    def __init__(self, compiler: Compiler, parameters: Parameters) -> None:
        self._compiler = compiler
        self._parameters = parameters

    def member(self, name: str, node: Node) -> Expression:
        """Return a member that is declared."""
        is_bare = self._parameters.begin.startswith("%s")
        if not 0 < len(name) <= _MAX_NAME or _UNWRITABLE & set(name) or (is_bare and not name.isidentifier()):
            raise GrammarError(f"the name {name[:40]!r} cannot be written in this model's calls")
        return self._write(literal(name), node, self._parameters.end.replace("%s", name))

    def other(self, names: Language, node: Node) -> Expression:
        """Return a member of one of some names."""
        known = names & pattern_language(_NAME, searches=False)
        # A name cannot be said again where it is one of several.
        end = self._parameters.end
        return NEVER if known.is_empty or "%s" in end else self._write(Regular(known), node, end)

    def _write(self, name: Expression, node: Node, end: str) -> Expression:
        written = self._parameters
        form = any_form() if node is ANYTHING else self._compiler.form(node)
        before, behind = written.begin.split("%s")
        return series(literal(before), name, literal(behind), self._value(node, form, end))

    def _value(self, node: Node, form: Form, ending: str) -> Expression:
        """Return a value and what ends it."""
        written, end = self._parameters, literal(ending)
        if written.text is None:
            return series(self._python(node, form), end)
        before, behind = map(literal, written.text)
        rest = replace(form, strings=NO_STRINGS)
        types = frozenset[str]() if written.tells_texts else _types(rest)
        options: list[Expression] = []
        # Where values of other types may be any of these, each text is one of them, or a string.
        if form.strings == ALL_STRINGS and rest == form_of_types(types):
            rest = no_form()
            types = frozenset()
        if form.strings == ALL_STRINGS and not types:
            text = series(Regular(_without(written.stops)), behind, end)
            options.append(series(before, self._compiler.rule(_TEXT_RULE + ending, text)))
        elif form.strings.parts:
            texts = choice([self._text(part, types) for part in form.strings.parts])
            options.append(series(before, texts, behind, end))
        if not rest.is_empty:
            value = self._compiler.write(rest) if options else self._compiler.value(node)
            options.append(series(literal(written.before_json), value, end))
        return choice(options)

    def _python(self, node: Node, form: Form) -> Expression:
        if not self._parameters.is_python or not (form.null or form.booleans):
            return self._compiler.value(node)
        rest = replace(form, null=False, booleans=frozenset())
        words: list[Expression | str] = [*["None"] * form.null, *(str(value) for value in sorted(form.booleans))]
        return choice([*words, *([] if rest.is_empty else [self._compiler.write(rest)])])

    def _text(self, part: Part, others: frozenset[str]) -> Expression:
        """Return texts that are read as strings, where values may be of other types too."""
        stops = self._parameters.stops
        if part.language == ANY_TEXTS and part.most is not None and part.most > _MAX_COUNTED and not others:
            firsts = [(ord(stop[0]), ord(stop[0])) for stop in stops]
            return Repeat(Chars(complement(union(firsts))), part.least, part.most)
        known = part.exact & _without(stops)
        for name in sorted(others):
            known = known - pattern_language(f"{_SPACE}(?:{_PATTERNS[name]}){_SPACE}", searches=False)
        return Regular(known)


def _types(form: Form) -> frozenset[str]:
    numbers = form.numbers
    has = {
        "null": form.null,
        "boolean": bool(form.booleans),
        "integer": not numbers.is_empty,
        "number": not (numbers & whole_numbers().others()).is_empty,
        "object": bool(form.objects),
        "array": bool(form.arrays),
    }
    return frozenset(name for name, is_one in has.items() if is_one)


@lru_cache(maxsize=64)
def _without(stops: tuple[str, ...]) -> Language:
    """Return all texts that hold none of some."""
    return reduce(Language.__sub__, (pattern_language(re.escape(stop)) for stop in stops), ANY_TEXTS)
