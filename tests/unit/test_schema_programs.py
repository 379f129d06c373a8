# SPDX-License-Identifier: Apache-2.0
"""Schemas as programs write them: each compiles at once, allows its valid values and no others."""

from __future__ import annotations

from typing import Any

import jsonschema.protocols
import jsonschema.validators
import pytest

from automata import PlainAutomaton
from blink.grammar.compiler import compile_structured
from blink.structured_outputs import StructuredOutputsParams
from cpu_seconds import forget_automata, least_seconds
from json_schemas import Program, exactly, read_programs
from value_walks import draw_values, walks

PROGRAMS = read_programs()
_MAX_SECONDS = 2  # of a core


def checker(schema: Any) -> jsonschema.protocols.Validator:
    of_draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return of_draft(exactly(schema), format_checker=of_draft.FORMAT_CHECKER)


def test_there_are_forty_and_their_values_are_what_they_say() -> None:
    assert len({program.name for program in PROGRAMS}) == 40
    for program in PROGRAMS:
        validator = checker(program.schema)
        validator.check_schema(program.schema)
        assert len(program.valid) >= 2 and len(program.invalid) >= 2
        assert all(validator.is_valid(exactly(value)) for value in program.valid), program.name
        assert not any(validator.is_valid(exactly(value)) for value in program.invalid), program.name


@pytest.mark.parametrize(
    "program",
    [
        *PROGRAMS[::2],
        *(pytest.param(program, marks=pytest.mark.long) for program in PROGRAMS[1::2]),
    ],
    ids=lambda program: program.name,
)
def test_what_a_program_s_schema_allows_can_be_written_and_nothing_else(program: Program) -> None:
    params = StructuredOutputsParams(json=program.schema)
    assert least_seconds(lambda: (forget_automata(), compile_structured(params)), enough=_MAX_SECONDS) < _MAX_SECONDS
    automaton = PlainAutomaton(compile_structured(params).data)
    assert [value for value in program.valid if not walks(automaton, value)] == []
    assert [value for value in program.invalid if walks(automaton, value)] == []
    validator = checker(program.schema)
    values = draw_values(automaton, 20)
    assert values
    for value in values:
        validator.validate(value)
