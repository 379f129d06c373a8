# SPDX-License-Identifier: Apache-2.0
"""Write an object that stands in growing text in another notation than JSON's as JSON, while it grows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from blink.text.message.argument_types import quote
from blink.text.message.json_value import Status

_SPACE = " \t\r\n"
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MAX_WORD = 256
_WORD = re.compile(rf"[\w.+-]{{1,{_MAX_WORD + 1}}}")
_BARE_TEXT = re.compile(rf"[^,:{{}}\[\]\"<]{{1,{_MAX_WORD + 1}}}")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_MAX_SPACE = 64
_SEPARATORS = ",:)]}"
# The beginning of a set of which the first item is short, and what may become one.
_TEXTS = r"'(?:[^'\\]|\\.){0,256}", r'"(?:[^"\\]|\\.){0,256}'
_SET = re.compile(rf"\{{\s{{0,64}}(?:{_TEXTS[0]}'|{_TEXTS[1]}\"|[\w.+-]{{1,256}})\s{{0,64}}[,}}]", re.DOTALL)
_SET_BEGUN = re.compile(
    rf"\{{\s{{0,64}}(?:(?:{_TEXTS[0]}(?:'|\\?)|{_TEXTS[1]}(?:\"|\\?)|[\w.+-]{{1,256}})\s{{0,64}})?", re.DOTALL
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_ESCAPE_SIZES = {"x": 4, "u": 6, "U": 10}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_KEY, _COLON, _VALUE, _COMMA = range(4)  # what is expected next


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written."""

    quotes: tuple[str, ...]  # around strings; of several that begin alike the longest first
    plain_quotes: tuple[str, ...] = ()  # those within which a backslash is none
    colon: str = ":"  # behind a key of the outermost object
    has_bare_texts: bool = False  # strings may stand without quotes
    has_sets: bool = False  # braces without colons are arrays
    has_inner_quotes: bool = False  # a quote that no separator follows is the string's


PYTHON = Notation(('"""', "'''", '"', "'"), colon="=", has_sets=True, has_inner_quotes=True)


@dataclass(slots=True)
class _Frame:
    """An object or an array that is open."""

    closer: str
    is_object: bool
    colon: str = ":"
    is_empty: bool = field(default=True)


class LiteralObject:
    """Follow one object from its opening bracket on."""

    def __init__(self, notation: Notation) -> None:
        self.status = Status.OPEN
        self._notation = notation
        self._frames: list[_Frame] = []
        self._expected = _VALUE
        self._quote = ""  # of the open string
        self._is_key = False  # the open string is one

    def feed(self, text: str, place: int) -> tuple[int, str]:
        """Take the text from `place` on as far as it is certain; return where that ends, and its JSON."""
        found: list[str] = []
        while place < len(text) and self.status is Status.OPEN:
            after = self._read_string(text, place, found) if self._quote else self._read(text, place, found)
            if after == place and self.status is Status.OPEN:
                break
            place = after
        return place, "".join(found)

    def _read(self, text: str, place: int, found: list[str]) -> int:
        """Take one token outside of strings; none where it may go on behind the text."""
        first = text[place]
        if first in _SPACE:
            return place + 1
        if self._expected == _VALUE and first in _CLOSERS:
            return self._open(text, place, found)
        if self._frames and first == self._frames[-1].closer and self._expected != _COLON:
            return self._close(place, found)
        if self._expected == _COMMA and first == ",":
            self._expected = _KEY if self._frames[-1].is_object else _VALUE
        elif self._expected == _COLON and first == self._frames[-1].colon:
            found.append(": ")
            self._expected = _VALUE
        elif self._expected in (_KEY, _VALUE) and self._frames:
            return self._read_scalar(text, place, found)
        else:
            self.status = Status.BROKEN
            return place
        return place + 1

    def _open(self, text: str, place: int, found: list[str]) -> int:
        first = text[place]
        is_object = first == "{" or not self._frames
        if is_object and self._frames and self._notation.has_sets:
            is_object = _SET.match(text, place) is None
            if is_object and _SET_BEGUN.fullmatch(text, place):
                return place
        if self._frames:
            self._begin_item(found)
        colon = self._notation.colon if not self._frames else ":"
        self._frames.append(_Frame(_CLOSERS[first], is_object, colon))
        found.append("{" if is_object else "[")
        self._expected = _KEY if is_object else _VALUE
        return place + 1

    def _close(self, place: int, found: list[str]) -> int:
        if self._expected == _VALUE and self._frames[-1].is_object:  # behind a key
            self.status = Status.BROKEN
            return place
        found.append("}" if self._frames.pop().is_object else "]")
        self._expected = _COMMA
        if not self._frames:
            self.status = Status.DONE
        return place + 1

    def _begin_item(self, found: list[str]) -> None:
        """Write what stands before a key, or before an array's item."""
        frame = self._frames[-1]
        if frame.is_object and self._expected == _VALUE:
            return
        found.append("" if frame.is_empty else ", ")
        frame.is_empty = False

    def _read_scalar(self, text: str, place: int, found: list[str]) -> int:
        rest = text[place : place + 8]
        for mark in self._notation.quotes:
            if len(rest) < len(mark) and mark.startswith(rest):
                return place
            if rest.startswith(mark):
                self._begin_item(found)
                found.append('"')
                self._quote, self._is_key = mark, self._expected == _KEY
                return place + len(mark)
        pattern = _BARE_TEXT if self._notation.has_bare_texts else _WORD
        word = pattern.match(text, place)
        if word is not None and word.end() == len(text) and len(word[0]) <= _MAX_WORD:
            return place
        written = None if word is None or len(word[0]) > _MAX_WORD else self._write_word(word[0].strip())
        if word is None or written is None:
            self.status = Status.BROKEN
            return place
        self._begin_item(found)
        found.append(written)
        self._expected = _COLON if self._expected == _KEY else _COMMA
        return word.end()

    def _write_word(self, word: str) -> str | None:
        """Return the JSON of a key, or of a value without quotes, None if it is none."""
        if self._expected == _KEY:
            return quote(word) if word.isidentifier() or self._notation.has_bare_texts else None
        if word in _CONSTANTS or _JSON_NUMBER.fullmatch(word):
            return _CONSTANTS.get(word, word)
        if self._notation.has_bare_texts:
            return quote(word)
        try:
            number = float(word)
        except ValueError:
            return None
        return repr(int(number) if number.is_integer() else number) if abs(number) < 1e300 else None

    def _read_string(self, text: str, place: int, found: list[str]) -> int:
        is_plain = self._quote in self._notation.plain_quotes
        ends = [text.find(self._quote, place), -1 if is_plain else text.find("\\", place)]
        end = min((each for each in ends if each >= 0), default=-1)
        if end < 0:
            # The end may hold the beginning of the quote.
            sizes = range(min(len(self._quote) - 1, len(text) - place), 0, -1)
            held = next((size for size in sizes if self._quote.startswith(text[len(text) - size :])), 0)
            end = len(text) - held
            found.append(quote(text[place:end])[1:-1])
            return end
        found.append(quote(text[place:end])[1:-1])
        if text.startswith(self._quote, end):
            is_last = self._is_last_quote(text, end + len(self._quote))
            if is_last is None:
                return end
            if not is_last:
                found.append(quote(self._quote)[1:-1])
                return end + len(self._quote)
            found.append('"')
            end += len(self._quote)
            self._quote = ""
            self._expected = _COLON if self._is_key else _COMMA
            return end
        return self._read_escape(text, end, found)

    def _is_last_quote(self, text: str, behind: int) -> bool | None:
        """Say whether a quote ends its string, None if what follows will tell."""
        if not self._notation.has_inner_quotes or len(self._quote) > 1:
            return True
        rest = text[behind : behind + _MAX_SPACE].lstrip(_SPACE)
        if rest:
            return rest[0] in _SEPARATORS
        return None if len(text) - behind < _MAX_SPACE else False

    def _read_escape(self, text: str, place: int, found: list[str]) -> int:
        escape = _ESCAPE.match(text, place)
        if escape is None:
            size = _ESCAPE_SIZES.get(text[place + 1 : place + 2], 2)
            if len(text) - place < size:
                return place
            found.append("\\\\")  # a backslash that begins no escape
            return place + 1
        kind, digits = escape[0][1], escape[0][2:]
        if kind == "u":
            found.append(escape[0])
        elif kind in "xU":
            code = int(digits, 16)
            found.append(quote(chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape[0])[1:-1])
        elif kind in _CONTROLS:
            found.append(quote(_CONTROLS[kind])[1:-1])
        else:
            found.append(quote(kind if kind in "\\/'\"" else escape[0])[1:-1])
        return escape.end()
