# SPDX-License-Identifier: Apache-2.0
"""Sets of strings: languages, and lengths apart from them, as those of a long text would be many states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blink.grammar.bounded import bounded
from blink.grammar.errors import GrammarTooLargeError
from blink.grammar.expression import Call, Escapes, Expression, Regular, Repeat, choice, series
from blink.grammar.json_text import STRING_RULE, any_chars, any_string
from blink.grammar.language import ANY_TEXTS, NO_TEXTS, Language, one_char, texts, texts_of_lengths

_MAX_PARTS = 64
_MAX_STATES = 12_000
_MAX_EXACT = 1000  # of a language whose characters are counted one by one


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of a language that have a number of characters; most: None for no limit."""

    language: Language
    least: int = 0
    most: int | None = None

    def __and__(self, other: Part) -> Part:
        most = self.most if other.most is None else other.most if self.most is None else min(self.most, other.most)
        return _part(self.language & other.language, max(self.least, other.least), most)

    @property
    def is_empty(self) -> bool:
        return self.language.is_empty or (self.most is not None and self.least > self.most)

    @property
    def exact(self) -> Language:
        """Return the texts as a language alone."""
        if self.least == 0 and self.most is None:
            return self.language
        if max(self.least, self.most or 0) * self.language.num_states > _MAX_STATES:
            raise GrammarTooLargeError("a pattern or a format together with these lengths needs too many states")
        return self.language & texts_of_lengths(self.least, self.most)


def _part(language: Language, least: int, most: int | None) -> Part:
    """Return a part without the lengths that its language has anyway."""
    if language.is_empty:
        return Part(NO_TEXTS)
    shortest, longest = language.lengths
    if most is not None and longest is not None and longest <= most:
        most = None
    return Part(language, 0 if shortest >= least else least, most)


@dataclass(frozen=True, slots=True)
class Strings:
    """A set of strings: those of any of its parts."""

    parts: tuple[Part, ...]

    @property
    def is_empty(self) -> bool:
        return not self.parts

    def __and__(self, other: Strings) -> Strings:
        return _strings(one & two for one in self.parts for two in other.parts)

    def __or__(self, other: Strings) -> Strings:
        return _strings([*self.parts, *other.parts])

    def others(self) -> Strings:
        """Return all strings that are not in the set."""
        found = ALL_STRINGS
        for part in self.parts:
            options = [Part(ANY_TEXTS - part.language)]
            if part.least > 0:
                options.append(Part(ANY_TEXTS, 0, part.least - 1))
            if part.most is not None:
                options.append(Part(ANY_TEXTS, part.most + 1))
            found = found & _strings(options)
        return found

    def listed(self, most: int) -> list[str] | None:
        """Return the strings if they are few; None: there are more."""
        found: set[str] = set()
        for part in self.parts:
            shortest = _list(part, most)
            if shortest is None:
                return None
            found |= shortest
        return sorted(found) if len(found) <= most else None

    def expression(self, escapes: Escapes = Escapes.ALL) -> Expression:
        """Return how the strings are written, with their quotes."""
        return choice([_write(part, escapes) for part in self.parts])


def _strings(parts: Iterable[Part]) -> Strings:
    """Join what has no lengths."""
    plain, others = NO_TEXTS, dict[Part, None]()
    for part in parts:
        if part.is_empty:
            continue
        if part.least == 0 and part.most is None:
            plain = plain | part.language
        else:
            others[part] = None
    if plain == ANY_TEXTS:
        return ALL_STRINGS
    if len(others) > _MAX_PARTS:
        raise GrammarTooLargeError("too many lengths of strings stand for each other")
    return Strings(((Part(plain),) if not plain.is_empty else ()) + tuple(others))


def strings_of(language: Language) -> Strings:
    """Return the strings of a language."""
    return _strings([Part(language)])


def strings_of_lengths(least: int, most: int | None) -> Strings:
    """Return all strings of a number of characters."""
    return _strings([Part(ANY_TEXTS, least, most)])


def named_strings(values: Iterable[str]) -> Strings:
    """Return some strings."""
    return strings_of(texts(values))


ALL_STRINGS = Strings((Part(ANY_TEXTS),))
NO_STRINGS = Strings(())


def _list(part: Part, most: int) -> set[str] | None:
    language = part.exact if part.language.lengths[1] is not None else part.language
    if language.lengths[1] is None:
        return None
    found: set[str] = set()
    left = [(0, "")]
    while left:
        state, text = left.pop()
        if language.finals[state]:
            found.add(text)
        for end, ranges in language.moves[state].items():
            if sum(high - low + 1 for low, high in ranges) > most:
                return None
            left += [(end, text + chr(code)) for low, high in ranges for code in range(low, high + 1)]
        if len(found) + len(left) > 8 * most:
            return None
    return found


def _write(part: Part, escapes: Escapes) -> Expression:
    if part.language == ANY_TEXTS:
        if part.least == 0 and part.most is None:
            return Call(STRING_RULE) if escapes is Escapes.ALL else any_string(escapes)
        return series('"', any_chars(part.least, part.most, escapes), '"')
    char = _only_class(part.language)
    if char is not None:
        return series('"', Repeat(Regular(char, in_string=True, escapes=escapes), part.least, part.most), '"')
    size = part.language.num_states * max(part.least, part.most or 0)
    if part.most is not None and size > _MAX_EXACT:
        return series('"', bounded(part.language, part.least, part.most, escapes), '"')
    return series('"', Regular(part.exact, in_string=True, escapes=escapes), '"')


def _only_class(language: Language) -> Language | None:
    """Return one character of those of which all texts of a language are any repetition."""
    if language.num_states != 1:
        return None
    return one_char(language.moves[0].get(0, ()))
