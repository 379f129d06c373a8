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
from blink.grammar.budget import budget
from blink.grammar.errors import GrammarError, GrammarTooLargeError
from blink.grammar.expression import Expression, Without, choice
from blink.grammar.gbnf import parse_grammar
from blink.grammar.graph import build_automaton
from blink.grammar.harmony import compile_channels
from blink.grammar.json_schema import SchemaCompiler
from blink.grammar.json_text import Layout
from blink.grammar.pattern import without_both
from blink.grammar.regex import parse_regex
from blink.grammar.tags import compile_tags, place_behind_reasoning
from blink.structured_outputs import Parameters, StructuredOutputsParams

MAX_GRAMMAR_BYTES = 256 << 10
_PARAM = "structured_outputs"


def compile_structured(params: StructuredOutputsParams) -> Automaton:
    """Compile what a request asks of its text's form; takes milliseconds to a second, whatever it is.

    Raises:
        BadRequestError: it is malformed, or nothing that can be kept; the message says why.
    """
    try:
        with budget():
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
        return _compile_documents(layout, lambda compile_one: _json_or_calls(params, schema, compile_one))
    if params.structural_tag is not None:
        tag = params.structural_tag
        assert not isinstance(tag, str)  # SamplingParams has read it
        # Each tag's schema is a document of its own, to which its references lead.
        return _compile_documents(layout, lambda compile_one: place(compile_tags(tag, compile_one)))
    if params.regex is not None:
        return build_automaton(place(without_both(parse_regex(params.regex))), {})
    if params.choice is not None:
        return build_automaton(place(choice([_encode(text) for text in params.choice])), {})
    if params.grammar is not None:
        root, rules = parse_grammar(params.grammar)
        return build_automaton(place(root), rules)
    if params.excluded_words:
        return build_automaton(Without(tuple(map(_encode, params.excluded_words))), {})
    channels = params.channels
    assert channels is not None
    return _compile_documents(layout, lambda compile_one: compile_channels(channels, None, compile_one))


def _place(params: StructuredOutputsParams, form: Expression) -> Expression:
    """Return the form where it stands in a reply."""
    if params.channels is not None:
        return compile_channels(replace(params.channels, calls={}), form, lambda _: form)
    return place_behind_reasoning(params, form)


def _compile_documents(layout: Layout, assemble: Callable[[Callable[..., Expression]], Expression]) -> bytes:
    rules = layout.rules()

    def compile_one(schema: Any, parameters: Parameters | None = None) -> Expression:
        compiler = SchemaCompiler(_own_copy(schema), layout, f"{len(rules)} ")
        found = compiler.compile() if parameters is None else compiler.compile_members(parameters)
        rules.update(compiler.rules)
        return found

    return build_automaton(assemble(compile_one), rules)


def _json_or_calls(params: StructuredOutputsParams, schema: Any, compile_one: Callable[..., Expression]) -> Expression:
    if params.channels is not None:
        return compile_channels(params.channels, compile_one(schema), compile_one)
    forms = [compile_one(schema)]
    if params.calls is not None:
        forms.append(compile_tags(params.calls, compile_one))
    return place_behind_reasoning(params, choice(forms))


def _own_copy(schema: Any) -> Any:
    """Return a copy of a schema, which may be changed, of what JSON has."""
    try:
        return json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise GrammarError(f"a schema is no JSON ({error})") from None


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
