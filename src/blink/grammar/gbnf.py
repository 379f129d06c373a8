# SPDX-License-Identifier: Apache-2.0
"""EBNF grammars as GGML writes them: `root ::= "a" [b-c]+ (item | "x")?`."""

from __future__ import annotations

import re

from blink.grammar.assertions import ANY_CHAR
from blink.grammar.errors import GrammarError
from blink.grammar.expression import Call, Expression, Repeat, Series, Text, choice
from blink.grammar.regex import parse_regex

_ROOT = "root"
_MAX_DEPTH = 40
_MAX_RULES = 1000
_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<count>\{\d{0,6}(?:,\d{0,6})?\})|(?P<sign>::=|[()|*+?.])"""
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
Token = tuple[str, str]  # its kind, and the text


def parse_grammar(text: str) -> tuple[Expression, dict[str, Expression]]:
    """Return the root of a grammar and its rules.

    Raises:
        GrammarError: it is malformed, or a rule is missing.
    """
    rules: dict[str, Expression] = {}
    tokens = _split(text)
    starts = [at for at in range(len(tokens) - 1) if tokens[at][0] == "name" and tokens[at + 1][1] == "::="]
    if not starts or starts[0] != 0:
        raise GrammarError("a grammar is rules such as: root ::= ...")
    if len(starts) > _MAX_RULES:
        raise GrammarError(f"a grammar may have {_MAX_RULES} rules")
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        name = tokens[start][1]
        if name in rules:
            raise GrammarError(f"rule {name!r} is there twice")
        rules[name] = _Parser(tokens[start + 2 : end]).parse()
    known = {tokens[at][1] for at in starts}
    for kind, name in tokens:
        if kind == "name" and name not in known:
            raise GrammarError(f"rule {name!r} is missing")
    if _ROOT not in rules:
        raise GrammarError(f"rule {_ROOT!r} is missing")
    return Call(_ROOT), rules


def _split(text: str) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise GrammarError(f"grammar: {text[at : at + 20]!r} is not understood")
        at = found.end()
        if found.lastgroup != "space":
            tokens.append((found.lastgroup or "", found[0]))
    return tokens


class _Parser:
    """Recursive descent over the tokens of one rule."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = self._depth = 0

    def parse(self) -> Expression:
        found = self._alternatives()
        if self._at < len(self._tokens):
            raise GrammarError(f"grammar: {self._tokens[self._at][1]!r} is not expected")
        return found

    def _peek(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "")

    def _alternatives(self) -> Expression:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarError("grammar: it is nested too deeply")
        options = [self._sequence()]
        while self._peek()[1] == "|":
            self._at += 1
            options.append(self._sequence())
        self._depth -= 1
        return choice(options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (token := self._peek())[0] and token[1] not in ("|", ")"):
            part = self._item(token)
            while (counts := self._counts()) is not None:
                part = Repeat(part, *counts)
            parts.append(part)
        return Series(tuple(parts))

    def _item(self, token: Token) -> Expression:
        kind, text = token
        self._at += 1
        if kind == "name":
            return Call(text)
        if kind == "text":
            return Text(_unescape(text[1:-1]).encode())
        if kind == "set":
            return parse_regex(_unescape_wide(text))
        if text == ".":
            return ANY_CHAR
        if text != "(":
            raise GrammarError(f"grammar: {text!r} is not expected")
        found = self._alternatives()
        if self._peek()[1] != ")":
            raise GrammarError("grammar: a parenthesis is not closed")
        self._at += 1
        return found

    def _counts(self) -> tuple[int, int | None] | None:
        kind, text = self._peek()
        signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if text not in signs and kind != "count":
            return None
        self._at += 1
        if text in signs:
            return signs[text]
        least, comma, most = text[1:-1].partition(",")
        if not least and not most:
            raise GrammarError(f"grammar: {text!r} counts nothing")
        low, high = int(least or 0), int(most) if most else None if comma else int(least)
        if high is not None and low > high:
            raise GrammarError(f"grammar: {text!r} allows nothing")
        return low, high


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: _character(found[1]), text)


def _unescape_wide(text: str) -> str:
    """Write \\U escapes as those of regular expressions."""
    return re.sub(r"\\U([0-9A-Fa-f]{8})", r"\\u{\1}", text)


def _character(escape: str) -> str:
    code = int(escape[1:], 16) if len(escape) > 1 else 0
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise GrammarError(f"grammar: \\{escape} is no character")
    return chr(code) if len(escape) > 1 else _CONTROLS.get(escape, escape)
