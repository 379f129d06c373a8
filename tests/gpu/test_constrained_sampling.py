# SPDX-License-Identifier: Apache-2.0
"""Constrained rows: what each may sample, against the CPU's list of it, and what is sampled against the reference."""

from __future__ import annotations

import random

import pytest
import torch

import sampling_oracle
from automata import Place, PlainAutomaton
from blink.grammar.automaton import Automaton
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu.constraint import list_allowed
from blink.kernels.operands import GRAMMAR_DONE, INVALID_LOGITS
from constrained_batch import NUM_PROMPT, STOP_TOKEN, automaton_of, make_constrained, make_vocabulary, place_behind

gpu_sampling = pytest.importorskip("blink.kernels.gpu.sampling")
gpu_constraint = pytest.importorskip("blink.kernels.gpu.constraint")

VOCABULARY = make_vocabulary(3000)
KINDS = [
    automaton_of(json_object=True),
    automaton_of(regex="[a-c]{2,5}"),
    None,
    automaton_of(choice=["yes", "no", "maybe"]),
    automaton_of(json={"type": "array", "items": {"type": "string", "maxLength": 300}, "minItems": 1}),
]


def text_tokens(text: bytes) -> list[int]:
    return [VOCABULARY.index(bytes([byte])) for byte in text]


BEGUN = [text_tokens(b'{"a": [[[{"b":'), text_tokens(b"ab"), text_tokens(b"free"), text_tokens(b"yes"), []]


def move(batch: Batch, device: torch.device) -> Batch:
    return Batch(**{name: getattr(batch, name).clone().to(device) for name in Batch.__dataclass_fields__})


def expected_bits(batch: Batch, row: int) -> tuple[list[int], bool]:
    bits, may_end = list_allowed(batch, int(batch.row_slots[row]), int(batch.context_lens[row]))
    assert bits is not None
    return bits.tolist(), may_end


def find_bits(batch: Batch, num_rows: int = 1) -> list[list[int] | None]:
    """Return what the rows may sample, None where nothing or all is allowed."""
    allowed = gpu_constraint.find_allowed(batch, num_rows, len(VOCABULARY))
    return [None if at < 0 else allowed.bits[at].tolist() for at in allowed.lists.tolist()]


def bits_behind(automaton: Automaton, texts: bytes | list[bytes]) -> list[int]:
    """Return what may follow a text by the plain walker: tokens all of whose bytes it takes, a stop token at an end."""
    plain = PlainAutomaton(automaton.data)
    place = place_behind(automaton, [texts] if isinstance(texts, bytes) else texts)
    bits = torch.zeros(-(-len(VOCABULARY) // 32), dtype=torch.int64)
    for token, each in enumerate(VOCABULARY):
        if plain.may_end(place) if token == STOP_TOKEN else each and walks(plain, each, place):
            bits[token // 32] |= 1 << token % 32
    return bits.to(torch.int32).tolist()


@pytest.mark.parametrize("rows", [5, 40])
def test_what_rows_may_sample_is_what_the_cpu_lists(rows: int, device: torch.device) -> None:
    picked = [(KINDS[row % 5], BEGUN[row % 5][: row + 1]) for row in range(rows)]
    batch = make_constrained(VOCABULARY, *zip(*picked, strict=True))
    found = move(batch, device)
    allowed = gpu_constraint.find_allowed(found, rows, len(VOCABULARY))
    places = found.automaton_places.cpu()
    for row, (automaton, _) in enumerate(picked):
        if automaton is None:
            assert int(allowed.may_end[row]) == 0
            continue
        bits, may_end = expected_bits(batch, row)
        assert (allowed.bits[allowed.lists[row]].tolist(), bool(allowed.may_end[row])) == (bits, may_end)
    assert places.tolist() == batch.automaton_places.tolist()


@pytest.mark.usefixtures("_each_sampling_group")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("limits", [{}, {Param.TOP_K: 40}, {Param.TOP_P: 0.9}, {Param.NUM_LOGPROBS: 3}], ids=str)
def test_constrained_rows_sample_as_the_reference(
    temperature: float, limits: dict[Param, float], device: torch.device
) -> None:
    batch = make_constrained(VOCABULARY, KINDS, BEGUN)
    for slot in batch.row_slots.tolist():
        batch.params_f32[slot, Param.TEMPERATURE] = temperature
        for param, value in limits.items():
            (batch.params_f32 if param <= Param.FREQUENCY_PENALTY else batch.params)[slot, param] = value
    logits = torch.randn(5, len(VOCABULARY), generator=torch.Generator().manual_seed(4)) * 3
    found = move(batch, device)
    gpu_sampling.sample(logits.to(device), found, 5)
    sampling_oracle.sample(logits, batch, 5)
    assert found.sampled_tokens.tolist() == batch.sampled_tokens.tolist()
    torch.testing.assert_close(found.sampled_logprobs.cpu(), batch.sampled_logprobs, rtol=1e-4, atol=1e-4)
    for row, automaton in enumerate(KINDS):
        token = int(batch.sampled_tokens[row])
        if automaton is not None and token != STOP_TOKEN:
            begun = b"".join(VOCABULARY[each] for each in BEGUN[row])
            assert walks(PlainAutomaton(automaton.data), begun + VOCABULARY[token])


def walks(automaton: PlainAutomaton, text: bytes, begin: Place | None = None) -> bool:
    return automaton.take_token(begin or automaton.start, text) is not None


@pytest.mark.usefixtures("_each_sampling_group")
def test_a_complete_text_ends_with_or_without_a_stop_token(device: torch.device) -> None:
    automata = [KINDS[3]] * 3
    tokens = [text_tokens(b"maybe"), text_tokens(b"maybe"), text_tokens(b"may")]
    batch = make_constrained(VOCABULARY, automata, tokens)
    slots = batch.row_slots.tolist()
    batch.params[slots[1], Param.NUM_STOP_TOKENS] = 0
    batch.params[slots[2], Param.NUM_STOP_TOKENS] = 0
    logits = torch.randn(3, len(VOCABULARY), generator=torch.Generator().manual_seed(5))
    logits[2, [token for token, text in enumerate(VOCABULARY) if text in (b"b", b"be")]] = -torch.inf
    found = move(batch, device)
    gpu_sampling.sample(logits.to(device), found, 3)
    assert found.sampled_tokens.tolist() == [STOP_TOKEN, GRAMMAR_DONE, INVALID_LOGITS]


@pytest.mark.parametrize("length", [9, 10])
def test_a_step_over_what_was_computed_before_forgets_nothing(length: int, device: torch.device) -> None:
    """After a preemption a text is computed again in chunks, whose ends may be anywhere."""
    tokens = text_tokens(b'{"a": [[[{"b":')[:length]
    batch = move(make_constrained(VOCABULARY, [KINDS[0]], [tokens]), device)
    expected = find_bits(batch)
    assert KINDS[0] is not None
    assert expected[0] == bits_behind(KINDS[0], b"".join(VOCABULARY[token] for token in tokens))
    for done in (0, 1, 2, 5, length - 2, length - 1):
        batch.context_lens[0] = NUM_PROMPT + done
        assert find_bits(batch) == [None]
    batch.context_lens[0] = NUM_PROMPT + length
    assert find_bits(batch) == expected


def generate(batch: Batch, row: int, text: bytes) -> None:
    """Let a row have generated one more token."""
    slot, context = int(batch.row_slots[row]), int(batch.context_lens[row])
    batch.tokens[slot, context] = VOCABULARY.index(text)
    batch.context_lens[row] = context + 1


def test_a_list_is_kept_while_its_text_stays_at_one_place_and_made_anew_behind_it(device: torch.device) -> None:
    automata = [automaton_of(json={"type": "array", "items": {"type": "string"}}), automaton_of(regex="x*y?")]
    batch = move(make_constrained(VOCABULARY, automata, [[], []]), device)
    texts = [b"", b""]
    pieces = [b"[", b'"', *b"abc", *b"a\\n", b"\xc3", b"\xa9", b'"', b",", b'"', *b"zz", b'"', b"]"]
    for piece in [b"", *(bytes([each]) if isinstance(each, int) else each for each in pieces)]:
        for row, text in enumerate([piece, b"x"] if piece else []):
            generate(batch, row, text)
            texts[row] += text
        assert find_bits(batch, 2) == [bits_behind(*each) for each in zip(automata, texts, strict=True)]
    lists = batch.token_bitmasks.view(batch.params.shape[0], 2, -1)[int(batch.row_slots[1])]
    lists[:] = 7  # that of x* is read and not made again
    generate(batch, 1, b"x")
    assert find_bits(batch, 2)[1] == [7] * lists.shape[1]
    generate(batch, 1, b"y")
    assert find_bits(batch, 2)[1] == bits_behind(automata[1], b"x" * len(pieces) + b"xy")


def test_a_list_is_not_that_of_the_slot_s_last_sequence(device: torch.device) -> None:
    automata = [automaton_of(regex="x*"), automaton_of(regex="x*z")]
    batch = move(make_constrained(VOCABULARY, automata, [[], []]), device)
    slot = int(batch.row_slots[0])
    for _ in range(3):
        find_bits(batch)
        generate(batch, 0, b"x")
    batch.automaton_places[slot] = -1  # as the scheduler leaves it
    batch.params[slot, Param.AUTOMATON] = 2
    for length in (0, 1, 2):
        batch.context_lens[0] = NUM_PROMPT + length
        assert find_bits(batch) == [bits_behind(automata[1], b"x" * length)]


UNIQUE = automaton_of(json={"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True})


@pytest.mark.parametrize("texts", [[b"["], [b"[", b"1"], [b"[", *b"1,12,1"], [b"[", *b"10, 1,0,10"]], ids=str)
def test_rows_know_which_items_they_have(texts: list[bytes | int], device: torch.device) -> None:
    tokens = [VOCABULARY.index(bytes([each]) if isinstance(each, int) else each) for each in texts]
    kinds, begun = [UNIQUE, KINDS[0], UNIQUE], [tokens, BEGUN[0], tokens[:2]]
    batch = make_constrained(VOCABULARY, kinds, begun)
    found = move(batch, device)
    lists = find_bits(found, 3)
    assert lists == [expected_bits(batch, row)[0] for row in range(3)]
    assert found.automaton_places.cpu().tolist() == batch.automaton_places.tolist()
    assert lists[0] == bits_behind(UNIQUE, [VOCABULARY[token] for token in tokens])
    assert find_bits(found, 3) == lists  # the step is done again


def test_rows_beyond_the_batch_are_left_alone(device: torch.device) -> None:
    batch = move(make_constrained(VOCABULARY, [KINDS[0]] * 3, [[]] * 3), device)
    batch.header[Header.NUM_ROWS] = 1
    before = batch.automaton_places.clone(), batch.token_bitmasks.clone()
    assert KINDS[0] is not None
    assert find_bits(batch, 3) == [bits_behind(KINDS[0], b""), None, None]
    others = batch.row_slots[1:].long()
    assert torch.equal(batch.automaton_places[others], before[0][others])
    assert torch.equal(batch.token_bitmasks[others], before[1][others])


def test_a_step_that_is_done_again_finds_its_list_again(device: torch.device) -> None:
    automaton = automaton_of(regex="x*(ab)*")
    batch = move(make_constrained(VOCABULARY, [automaton], [[]]), device)
    text = b""
    find_bits(batch)
    for piece in (b"x", b"x", b"a", b"b", b"a"):
        generate(batch, 0, piece)
        text += piece
        assert find_bits(batch) == find_bits(batch) == find_bits(batch) == [bits_behind(automaton, text)]


@pytest.mark.usefixtures("_each_sampling_group")
def test_a_token_that_the_automaton_does_not_take_leaves_nothing(device: torch.device) -> None:
    batch = move(make_constrained(VOCABULARY, [automaton_of(regex="x*")], [[]]), device)
    assert find_bits(batch) != [None]
    for piece in (b"q", b"x"):
        generate(batch, 0, piece)
        assert find_bits(batch) == [None]
    gpu_sampling.sample(torch.zeros(1, len(VOCABULARY), device=device), batch, 1)
    assert batch.sampled_tokens.tolist() == [INVALID_LOGITS]


ITEMS = {"type": ["string", "integer", "boolean"]}


@pytest.mark.parametrize(
    "automaton",
    [
        automaton_of(json_object=True),
        automaton_of(json={"type": "array", "items": ITEMS, "uniqueItems": True}),
        automaton_of(json={"type": "array", "items": {"type": "integer", "maximum": 12}, "uniqueItems": True}),
    ],
    ids=["object", "unique", "unique numbers"],
)
def test_a_text_goes_on_token_by_token_as_the_plain_walker_says(automaton: Automaton, device: torch.device) -> None:
    steps, chance = 60, random.Random(6)
    plain, tokens = PlainAutomaton(automaton.data), []
    batch = move(make_constrained(VOCABULARY, [automaton], [[]]), device)
    slot, text, place = int(batch.row_slots[0]), b"", plain.start
    for step in range(steps):
        batch.context_lens[0] = NUM_PROMPT + step
        bits = find_bits(batch)[0]
        assert bits is not None
        listed = [token for token in range(len(VOCABULARY)) if bits[token // 32] >> token % 32 & 1]
        for token in chance.sample(range(2, len(VOCABULARY)), 50):
            assert (token in listed) == (plain.take_token(place, VOCABULARY[token]) is not None), text
        if not (plain_choices := [token for token in listed if token != STOP_TOKEN]):
            break
        tokens.append(chance.choice(plain_choices))
        text += VOCABULARY[tokens[-1]]
        found = plain.take_token(place, VOCABULARY[tokens[-1]])
        assert found is not None
        place = found
        batch.tokens[slot, NUM_PROMPT + step] = tokens[-1]
