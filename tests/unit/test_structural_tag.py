# SPDX-License-Identifier: Apache-2.0
"""Structural tags as JSON: what each of xgrammar's forms allows, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from automata import PlainAutomaton
from blink.api.openai.sampling import build_sampling_params
from blink.api.openai.schema import ChatBody
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"begin": "<t>", "content": CONTENT, "end": "</t>"}
LEGACY = {"structures": [{"begin": "<t>", "schema": SCHEMA, "end": "</t>"}], "triggers": ["<t"]}


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Say whether a tag takes a text, asked for in each of the ways that there are."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    ways = [
        SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=json.dumps(tag))),
        *(
            build_sampling_params(ChatBody.model_validate(body | fields), {})
            for fields in (
                {"response_format": {"type": "structural_tag", **tag}},
                {"structured_outputs": {"structural_tag": json.dumps(tag)}},
            )
        ),
    ]
    assert ways[0].structured_outputs == ways[1].structured_outputs == ways[2].structured_outputs
    assert ways[0].structured_outputs is not None
    return PlainAutomaton(compile_structured(ways[0].structured_outputs).data).accepts(text.encode())


@pytest.mark.parametrize(
    ("tag", "taken", "refused"),
    [
        (LEGACY, ["free", 'so <t>{"n": 4}</t> and <t>{"n":5}</t>'], ["<t>{}</t>", "<t>"]),
        ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG]}}, ["a", '<t>{"n":1}</t>b'], ["<x"]),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": [TAG], "stop_after_first": True}},
            ['a<t>{"n":1}</t>'],
            ['<t>{"n":1}</t><t>{"n":1}</t>'],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ";", "at_least_one": True}},
            ['<t>{"n":1}</t>', '<t>{"n":1}</t>;<t>{"n":2}</t>'],
            ["", '<t>{"n":1}</t>,'],
        ),
        ({"format": {"type": "tag", **TAG}}, ['<t>{"n":-3}</t>'], ['a<t>{"n":1}</t>']),
        ({"format": CONTENT}, ['{"n": 7}'], ["{}"]),
        ({"format": {"type": "regex", "pattern": "b[ac]+"}}, ["bac"], ["b"]),
        ({"format": {"type": "grammar", "grammar": 'root ::= "x" | "yz"'}}, ["yz"], ["xy"]),
        ({"format": {"type": "const_string", "value": "only"}}, ["only"], ["on"]),
    ],
)
def test_a_structural_tag_takes_what_its_form_says(tag: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    assert [accepts(tag, text) for text in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"structures": LEGACY["structures"], "triggers": ["<t", "<u"]},
        {"structures": LEGACY["structures"], "triggers": []},
        {"structures": [{"begin": "<t>", "end": "</t>"}], "triggers": ["<t"]},
        {"structures": ["<t>"], "triggers": ["<t"]},
        {"format": {"type": "any_text"}},
        {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "at_least_one": True}},
        {"format": {"type": "tag", "begin": "<", "end": ">", "content": {"type": "any_text"}}},
        {"format": {"type": "regex", "pattern": 3}},
        {"format": [1]},
    ],
)
def test_other_structural_tags_are_refused(tag: dict[str, Any]) -> None:
    for text in (json.dumps(tag), json.dumps(tag)[:-1]):
        with pytest.raises(BadRequestError) as caught:
            SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=text))
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("given", [{"type": "json_object", **LEGACY}, {"type": "structural_tag", "schema": SCHEMA}])
def test_members_of_another_type_of_format_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "response_format": given})
    assert caught.value.param == "response_format"
