# SPDX-License-Identifier: Apache-2.0
"""Constrained rows: what each may sample, against the CPU's list of it, and what is sampled against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from automata import PlainAutomaton
from blink.kernels.batch import Batch, Param
from blink.kernels.cpu import sampling as cpu
from blink.kernels.cpu.constraint import list_allowed
from blink.kernels.operands import NO_TOKEN, TEXT_END
from constrained_batch import NUM_PROMPT, STOP_TOKEN, automaton_of, make_constrained, make_vocabulary
from triton_interpreter import IS_INTERPRETED

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
    words = torch.zeros(-(-len(VOCABULARY) // 32), dtype=torch.int32)
    may_end = list_allowed(words, batch, int(batch.row_slots[row]), int(batch.context_lens[row]))
    return words.tolist(), may_end


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
        assert (allowed.bits[row].cpu().tolist(), bool(allowed.may_end[row])) == (bits, may_end)
    assert places.tolist() == batch.automaton_places.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("limits", [{}, {Param.TOP_K: 40}, {Param.TOP_P: 0.9}, {Param.NUM_LOGPROBS: 3}], ids=str)
def test_constrained_rows_sample_as_the_reference(
    temperature: float, limits: dict[Param, float], device: torch.device
) -> None:
    if IS_INTERPRETED and limits.keys() != {Param.TOP_P if temperature else Param.NUM_LOGPROBS}:
        pytest.skip("a case more that takes Triton's interpreter seconds")
    batch = make_constrained(VOCABULARY, KINDS, BEGUN)
    for slot in batch.row_slots.tolist():
        batch.params_f32[slot, Param.TEMPERATURE] = temperature
        for param, value in limits.items():
            (batch.params_f32 if param <= Param.FREQUENCY_PENALTY else batch.params)[slot, param] = value
    logits = torch.randn(5, len(VOCABULARY), generator=torch.Generator().manual_seed(4)) * 3
    found = move(batch, device)
    gpu_sampling.sample(logits.to(device), found, 5)
    cpu.sample(logits, batch, 5)
    assert found.sampled_tokens.tolist() == batch.sampled_tokens.tolist()
    torch.testing.assert_close(found.sampled_logprobs.cpu(), batch.sampled_logprobs, rtol=1e-4, atol=1e-4)
    for row, automaton in enumerate(KINDS):
        token = int(batch.sampled_tokens[row])
        if automaton is not None and token != STOP_TOKEN:
            begun = b"".join(VOCABULARY[each] for each in BEGUN[row])
            assert walks(PlainAutomaton(automaton.data), begun + VOCABULARY[token])


def walks(automaton: PlainAutomaton, text: bytes) -> bool:
    place = automaton.start
    for byte in text:
        found = automaton.take(place, byte)
        if found is None:
            return False
        place = found
    return True


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
    assert found.sampled_tokens.tolist() == [STOP_TOKEN, TEXT_END, NO_TOKEN]


@pytest.mark.parametrize("length", [9, 10])
def test_a_step_over_what_was_computed_before_forgets_nothing(length: int, device: torch.device) -> None:
    """After a preemption a text is computed again in chunks, whose ends may be anywhere."""
    tokens = text_tokens(b'{"a": [[[{"b":')[:length]
    batch = move(make_constrained(VOCABULARY, [KINDS[0]], [tokens]), device)
    expected = gpu_constraint.find_allowed(batch, 1, len(VOCABULARY)).bits.tolist()
    for done in (0, 1, 2, 5, length - 2, length - 1, length):
        batch.context_lens[0] = NUM_PROMPT + done
        found = gpu_constraint.find_allowed(batch, 1, len(VOCABULARY)).bits.tolist()
    assert found == expected


def test_a_text_goes_on_token_by_token_as_the_plain_walker_says(device: torch.device) -> None:
    steps = 6 if IS_INTERPRETED else 60
    automaton, chance = KINDS[0], random.Random(6)
    assert automaton is not None
    plain, tokens = PlainAutomaton(automaton.data), []
    batch = move(make_constrained(VOCABULARY, [automaton], [[]]), device)
    slot, text = int(batch.row_slots[0]), b""
    for step in range(steps):
        batch.context_lens[0] = NUM_PROMPT + step
        allowed = gpu_constraint.find_allowed(batch, 1, len(VOCABULARY))
        bits = allowed.bits[0].cpu()
        listed = [token for token in range(len(VOCABULARY)) if int(bits[token // 32]) >> token % 32 & 1]
        for token in chance.sample(range(2, len(VOCABULARY)), 50):
            assert (token in listed) == walks(plain, text + VOCABULARY[token])
        if not (plain_choices := [token for token in listed if token != STOP_TOKEN]):
            break
        tokens.append(chance.choice(plain_choices))
        text += VOCABULARY[tokens[-1]]
        batch.tokens[slot, NUM_PROMPT + step] = tokens[-1]
