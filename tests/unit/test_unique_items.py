# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Arrays with uniqueItems: what can be written, and token by token what the CPU lists against the plain walker."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from automata import Place, PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.kernels.batch import Batch
from blink.kernels.cpu.constraint import list_allowed
from constrained_batch import NUM_PROMPT, automaton_of, make_constrained

PIECES = [
    "[",
    "]",
    "{",
    "}",
    '"',
    '",',
    '","',
    '", "',
    '":',
    ",",
    ", ",
    " ",
    "1",
    "2",
    "3",
    "10",
    "1,",
    "1,2",
    ",1,",
    "-",
]
PIECES += ["0", ".5", "5", "1,2,3", "3,2,1]", "10,1,", "a", "b", "ab", 'a","', 'a","a', 'a","b","', "\\n", "\\u00", "é"]
PIECES += ["true", "false,", "tr", "ue", "null", ",null", "x", "y", '":["', '["', "[1", "[10", "1,2,3,4,5,6,7,8", "09"]
VOCABULARY = [b"", b"\xff<|end|>", *(each.encode() for each in PIECES)]


def array_of(items: Any, **keywords: Any) -> Automaton:
    return automaton_of(json={"type": "array", "items": items, "uniqueItems": True, **keywords})


def accepted(automaton: Automaton, texts: list[str]) -> list[bool]:
    plain = PlainAutomaton(automaton.data)
    return [plain.accepts(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("items", "right", "wrong"),
    [
        (
            {"type": "string"},
            ['["b","a"]', "[]", '["a", "ab" ,"abc","b"]', r'["\n","\u0001","\"","\\"]', '["é","日本"]', '["A","a"]'],
            ['["red","red"]', '["a","b","a"]', '["a", "b" , "a" ]', r'["\u0061"]', r'["\/"]', r'["\u000a"]', r'["é","é"]'],
        ),
        ({"type": "integer"}, ["[3,4]", "[1,11,111,-1]", "[0]"], ["[1,2,1]", "[12, 12]", "[-0]", "[1.0]"]),
        ({"type": "number"}, ["[1.5,1,0.5,-0.5]", "[10,1]"], ["[1.5,1.50]", "[1e2]", "[0.1,0.1]", "[2,2.0]", "[-0.0]"]),
        (
            {"type": ["string", "integer", "boolean", "null"]},
            ['["1",1,null,true,false,"true"]'],
            ["[null,null]", "[true,false,true]", '["1",1,"1"]', '[1,"a",1]'],
        ),
        ({"enum": [f"v{i}" for i in range(9)]}, ['["v8","v0","v3"]'], ['["v8","v0","v8"]', '["v9"]']),
        ({"type": "integer", "minimum": 1, "maximum": 12}, ["[12,1,11,10,2]", "[1,10,11,12,2,3,4,5,6,7,8,9]"], ["[1,10,1]"]),
        ({"type": "string", "maxLength": 2}, ['["ab","aé","a",""]'], ['["ab","ab"]', '["",""]']),
        ({"type": "string", "minLength": 2, "maxLength": 70}, [f'["{"a" * 70}","{"a" * 69}"]'], [f'["{"a" * 70}","{"a" * 70}"]']),
        ({"type": "string", "pattern": "^[a-z]{2,5}$"}, ['["ab","ba"]'], ['["ab","ab"]', '["abcde","abcde"]']),
        ({"type": "string", "format": "date"}, ['["2024-01-30","2024-01-31"]'], ['["2024-01-30","2024-01-30"]']),
    ],
)  # fmt: skip
def test_values_of_an_array_differ_in_any_order(items: Any, right: list[str], wrong: list[str]) -> None:
    automaton = array_of(items)
    assert all(accepted(automaton, right)) and not any(accepted(automaton, wrong))


def test_each_array_begins_anew() -> None:
    one = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    members = {"a": one, "b": one, "c": {"type": "array", "items": one}}
    automaton = automaton_of(json={"type": "object", "properties": members, "required": ["a", "b", "c"]})
    right = '{"a":["x","y"],"b":["y","x"],"c":[["x"],["x"],[],["x","y"]]}'
    wrong = [
        right.replace(*each) for each in (('"x","y"', '"y","y"'), ('"y","x"', '"x","x"'), ('["x"],[]', '["x","x"]'))
    ]
    assert accepted(automaton, [right, *wrong]) == [True, False, False, False]


@pytest.mark.parametrize(
    ("items", "keywords", "right", "wrong"),
    [
        ({"type": "integer"}, {"minItems": 2, "maxItems": 3}, ["[3,4]", "[5,4,3]"], ["[]", "[3]", "[1,2,3,4]", "[3,3]"]),
        ({"type": "string"}, {"maxItems": 2}, ["[]", '["a"]', '["b","a"]'], ['["a","b","c"]', '["a","a"]']),
        ({"type": "boolean"}, {"minItems": 2}, ["[true,false]", "[false, true]"], ["[true]", "[true,false,true]"]),
        ({"type": "integer"}, {}, [str(list(range(64)))], [str(list(range(65)))]),
        ({"type": "string"}, {"maxItems": 70}, [json.dumps([str(n) for n in range(64)])], [json.dumps([str(n) for n in range(65)])]),
    ],
)  # fmt: skip
def test_arrays_have_as_many_items_as_they_may(items: Any, keywords: Any, right: list[str], wrong: list[str]) -> None:
    automaton = array_of(items, **keywords)
    assert all(accepted(automaton, right)) and not any(accepted(automaton, wrong))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"items": {"type": "array"}, "uniqueItems": True}, "strings, numbers"),
        ({"items": {"type": "object"}, "uniqueItems": True}, "strings, numbers"),
        ({"items": {"type": "string"}, "uniqueItems": True, "minItems": 65}, "64 items"),
        ({"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3}, "no finite text"),
        ({"items": {"type": "string"}, "uniqueItems": True, "contains": {"const": "a"}}, "contains"),
        (
            {"anyOf": [{"items": {"type": "string"}, "uniqueItems": True}, {"items": {"type": ["string", "null"]}}]},
            "uniqueItems",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        automaton_of(json={"type": "array", **schema})


def parse(text: bytes) -> list[str]:
    return [json.dumps(each) for each in json.loads(text)]


@pytest.mark.parametrize(
    "items",
    [
        {"type": "string"},
        {"type": "number"},
        {"type": "integer", "minimum": 0, "maximum": 30},
        {"enum": ["a", "b", "ab", "abc", "bc", "c", 1, 12, 123, None]},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
        {"type": "string", "maxLength": 1},
    ],
    ids=str,
)
def test_drawn_texts_come_to_an_end_without_a_value_that_is_there_twice(items: Any) -> None:
    automaton, chance, most = PlainAutomaton(array_of(items).data), random.Random(5), 0
    for _ in range(12):
        text = automaton.draw(chance, 40)
        if text is not None:
            values = parse(text)
            assert len(set(values)) == len(values)
            most = max(most, len(values))
    assert most > 1


KINDS = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": 1, "maximum": 12},
    {"type": ["string", "boolean", "null", "integer"]},
    {"type": "string", "pattern": "^[ab]{1,2}$"},
    {"type": "string", "maxLength": 3},
]


class Slot:
    """A row that goes on token by token."""

    def __init__(self, automaton: Automaton) -> None:
        self.plain = PlainAutomaton(automaton.data)
        self.batch: Batch = make_constrained(VOCABULARY, [automaton], [[]])
        self.slot = int(self.batch.row_slots[0])
        self.tokens: list[int] = []

    def listed(self) -> list[int]:
        found, _ = list_allowed(self.batch, self.slot, NUM_PROMPT + len(self.tokens))
        if found is None:
            return []
        bits = found[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        return [token for token in bits.view(-1).nonzero().view(-1).tolist() if token > 1]

    def expected(self, place: Place) -> list[int]:
        return [token for token in range(2, len(VOCABULARY)) if self.plain.take_token(place, VOCABULARY[token])]

    def add(self, token: int) -> None:
        self.batch.tokens[self.slot, NUM_PROMPT + len(self.tokens)] = token
        self.tokens.append(token)


@pytest.mark.parametrize("items", KINDS, ids=str)
def test_the_cpu_lists_what_the_plain_walker_takes_also_when_a_step_is_done_again(items: Any) -> None:
    automaton, chance = array_of(items), random.Random(8)
    num_texts, num_tokens = 0, 0
    while num_texts < 6:
        row = Slot(automaton)
        place: Place | None = row.plain.start
        for _ in range(25):
            assert place is not None
            listed = row.listed()
            assert listed == row.listed() == row.expected(place), b"".join(VOCABULARY[each] for each in row.tokens)
            if not listed:
                break
            row.add(chance.choice(listed))
            place = row.plain.take_token(place, VOCABULARY[row.tokens[-1]])
        num_texts, num_tokens = num_texts + 1, num_tokens + len(row.tokens)
    assert num_tokens > 25


def test_a_text_that_is_computed_again_knows_its_items_again() -> None:
    row = Slot(array_of({"type": "string"}))
    text = [b"[", b'"', b'a","b","', b"ab", b'","', b"a"]
    lists = []
    for piece in text:
        row.listed()
        row.add(VOCABULARY.index(piece))
    lists.append(row.listed())
    assert VOCABULARY.index(b'"') not in lists[0] and VOCABULARY.index(b"b") in lists[0]
    tokens, row.tokens = row.tokens, []
    row.batch.automaton_places[row.slot] = -1  # as the scheduler leaves it behind a preemption
    for token in tokens:
        row.listed()
        row.tokens.append(token)
    assert row.listed() == lists[0]


def test_one_token_may_complete_several_items_but_none_that_is_there() -> None:
    row = Slot(array_of({"type": "integer"}))
    assert VOCABULARY.index(b"[") in row.listed()
    row.add(VOCABULARY.index(b"["))
    listed = {VOCABULARY[token] for token in row.listed()}
    assert {b"1,2,3", b"1,2,3,4,5,6,7,8", b"10,1,"} <= listed
    row.add(VOCABULARY.index(b"1,2,3"))
    assert VOCABULARY.index(b"]") in row.listed()
    row.add(VOCABULARY.index(b","))
    listed = {VOCABULARY[token] for token in row.listed()}
    assert {b"10", b"1", b"3", b"09"} - listed == {b"09"} and not listed & {b"10,1,", b"1,2", b"1,", b"3,2,1]"}
