# SPDX-License-Identifier: Apache-2.0
"""From what a request asks of its text's form to the automaton that the engine keeps it by; bounded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.grammar.errors import AmbiguousGrammarError, GrammarError, GrammarTooLargeError
from blink.grammar.expression import Expression, choice
from blink.grammar.gbnf import parse_grammar
from blink.grammar.graph import build_automaton
from blink.grammar.harmony import compile_channels
from blink.grammar.json_schema import INLINE, SHARED, UNIONS, SchemaCompiler
from blink.grammar.json_text import Layout
from blink.grammar.regex import parse_regex
from blink.grammar.tags import compile_tags, place_behind_reasoning
from blink.structured_outputs import StructuredOutputsParams

MAX_GRAMMAR_BYTES = 256 << 10
_PARAM = "structured_outputs"


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
    place = partial(_place, params)
    if params.json_object or params.json is not None:
        schema = {"type": "object"} if params.json_object else _parse_schema(params.json)
        return _try_modes(
            lambda mode: _compile_documents(mode, layout, lambda one: _json_or_calls(params, schema, one))
        )
    if params.structural_tag is not None:
        tag = params.structural_tag
        # Each tag's schema is a document of its own, to which its references lead.
        return _try_modes(lambda mode: _compile_documents(mode, layout, lambda one: place(compile_tags(tag, one))))
    if params.regex is not None:
        return _build(place(parse_regex(params.regex)), {})
    if params.choice is not None:
        return _build(place(choice([_encode(text) for text in params.choice])), {})
    if params.grammar is not None:
        root, rules = parse_grammar(params.grammar)
        return _build(place(root), rules)
    channels = params.channels
    assert channels is not None
    return _try_modes(lambda mode: _compile_documents(mode, layout, lambda one: compile_channels(channels, None, one)))


def _place(params: StructuredOutputsParams, form: Expression) -> Expression:
    """Return the form where it stands in a reply."""
    if params.channels is not None:
        return compile_channels(replace(params.channels, calls={}), form, lambda _: form)
    return place_behind_reasoning(params, form)


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


def _json_or_calls(
    params: StructuredOutputsParams, schema: Any, compile_one: Callable[[Any], Expression]
) -> Expression:
    if params.channels is not None:
        return compile_channels(params.channels, compile_one(schema), compile_one)
    forms = [compile_one(schema)]
    if params.calls is not None:
        forms.append(compile_tags(params.calls, compile_one))
    return place_behind_reasoning(params, choice(forms))


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


def _parse_schema(schema: str | Mapping[str, Any] | bool | None) -> Any:
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
