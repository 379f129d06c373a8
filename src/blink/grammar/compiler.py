# SPDX-License-Identifier: Apache-2.0
"""From what a request asks of its text's form to the automaton that the engine keeps it by; bounded, and cached."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.grammar.errors import AmbiguousGrammarError, GrammarError, GrammarTooLargeError
from blink.grammar.expression import Expression, choice
from blink.grammar.gbnf import parse_grammar
from blink.grammar.graph import build_automaton
from blink.grammar.json_schema import INLINE, SHARED, UNIONS, SchemaCompiler
from blink.grammar.json_text import Layout
from blink.grammar.regex import parse_regex
from blink.grammar.tags import compile_tags
from blink.structured_outputs import StructuredOutputsParams

MAX_GRAMMAR_BYTES = 256 << 10
_PARAM = "structured_outputs"
_CACHE_BYTES = 32 << 20


class AutomatonCache:
    """Compiled automata by what they were asked for, the least recently used dropped. Safe for use by threads."""

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Automaton] = OrderedDict()

    def find(self, params: StructuredOutputsParams) -> Automaton | None:
        """Return what compile() would, if it is there."""
        return self._find(_key_of(params))

    def compile(self, params: StructuredOutputsParams) -> Automaton:
        """Return the automaton of what a request asks for.

        Raises:
            BadRequestError: it is malformed, or nothing that can be kept; the message says why.
        """
        key = _key_of(params)
        found = self._find(key)
        if found is not None:
            return found
        automaton = compile_structured(params)
        with self._lock:
            if key not in self._known:
                self._known[key] = automaton
                self._bytes += len(automaton.data)
            while self._bytes > self._max_bytes:
                _, dropped = self._known.popitem(last=False)
                self._bytes -= len(dropped.data)
        return automaton

    def _find(self, key: bytes) -> Automaton | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)


def compile_structured(params: StructuredOutputsParams) -> Automaton:
    """Compile what a request asks of its text's form; takes milliseconds to a second, whatever it is.

    Raises:
        BadRequestError: it is malformed, or nothing that can be kept; the message says why.
    """
    try:
        data = _compile(params)
    except GrammarError as error:
        raise BadRequestError(f"structured_outputs cannot be compiled: {error.message}.", _PARAM) from None
    except RecursionError:
        raise BadRequestError("structured_outputs is nested too deeply.", _PARAM) from None
    return Automaton(data)


def _compile(params: StructuredOutputsParams) -> bytes:
    layout = Layout(allows_spaces=not params.disable_any_whitespace)
    if params.json_object:
        return _compile_schema({"type": "object"}, layout)
    if params.json is not None:
        return _compile_schema(_parse_schema(params.json), layout)
    if params.structural_tag is not None:
        tag = params.structural_tag
        # Each tag's schema is a document of its own, to which its references lead.
        return _try_modes(lambda mode: _compile_documents(mode, layout, lambda one: compile_tags(tag, one)))
    if params.regex is not None:
        return _build(parse_regex(params.regex), {})
    if params.choice is not None:
        return _build(choice([_encode(text) for text in params.choice]), {})
    assert params.grammar is not None
    return _build(*parse_grammar(params.grammar))


def _compile_documents(
    mode: str, layout: Layout, assemble: Callable[[Callable[[Any], Expression]], Expression]
) -> tuple[Expression, dict[str, Expression]]:
    rules: dict[str, Expression] = layout.any_rules()

    def compile_one(schema: Any) -> Expression:
        compiler = SchemaCompiler(schema, layout, mode, f"{len(rules)} ")
        found = compiler.compile(schema)
        rules.update(compiler.rules)
        return found

    return assemble(compile_one), rules


def _compile_schema(schema: Any, layout: Layout) -> bytes:
    return _try_modes(lambda mode: _compile_documents(mode, layout, lambda one: one(schema)))


def _try_modes(compile_in: Callable[[str], tuple[Expression, Mapping[str, Expression]]]) -> bytes:
    """Build with as much shared as possible; where that leaves a byte undecided, with less."""
    failure: GrammarError | None = None
    for mode in (SHARED, INLINE, UNIONS):
        try:
            return _build(*compile_in(mode))
        except AmbiguousGrammarError as error:
            failure = failure or error
        except GrammarTooLargeError:
            if mode == SHARED:  # the others are no smaller
                raise
    assert failure is not None
    raise failure


def _build(root: Expression, rules: Mapping[str, Expression]) -> bytes:
    try:
        return build_automaton(root, rules)
    except AmbiguousGrammarError:
        return build_automaton(root, rules, is_inline=True)


def _parse_schema(schema: str | Mapping[str, Any] | bool) -> Any:
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_GRAMMAR_BYTES:
        raise GrammarTooLargeError(f"it has more than {MAX_GRAMMAR_BYTES} characters")
    try:
        return json.loads(schema)
    except ValueError as error:
        raise GrammarError(f"json is no JSON text ({error})") from None


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise GrammarError("a choice holds a lone surrogate") from None


def _key_of(params: StructuredOutputsParams) -> bytes:
    try:
        return blake2b(json.dumps(asdict(params), allow_nan=False).encode(), digest_size=32).digest()
    except (TypeError, ValueError, RecursionError):
        raise BadRequestError("structured_outputs holds what is no JSON, or is nested too deeply.", _PARAM) from None
