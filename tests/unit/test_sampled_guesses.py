# SPDX-License-Identifier: Apache-2.0
"""A draft head's guesses are sampled as the model's tokens of their places will be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sampling_oracle
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu.guesses import CpuGuesses
from blink.kernels.guesses import HeadTokens, spread
from blink.models.layers import Attention
from blink.models.rope import Rope
from model_driver import set_params

VOCAB, GUESSES, MAX_LEN = 200, 4, 32
ATTENTION = Attention(heads=2, kv_heads=1, head_dim=16, rope=Rope(theta=1e4, rotary_dim=16))
LENGTHS = (9, 14, MAX_LEN - 3)  # of the slots' texts, of which the newest token's row is in the step
PARAMS: tuple[dict[Param, float], ...] = (
    {Param.TEMPERATURE: 1.3, Param.NUM_LOGPROBS: 3},
    {Param.TEMPERATURE: 0.0},
    {Param.TEMPERATURE: 4.0, Param.TOP_K: 20, Param.TOP_P: 0.9},
)


def make_step(seed: int) -> Batch:
    """Return a sampled step of a row for each slot."""
    batch = Batch.allocate(
        max_tokens=3, max_rows=3, num_slots=3, max_blocks=2, max_model_len=MAX_LEN, has_draft_head=True
    )
    for slot, (length, params) in enumerate(zip(LENGTHS, PARAMS, strict=True)):
        set_params(batch, slot, {Param.NUM_PROMPT_TOKENS: 5, Param.SEED_LOW: seed + slot, **params})
        batch.positions[slot], batch.context_lens[slot], batch.row_slots[slot] = length - 1, length, slot
        batch.sampled_tokens[slot] = 7 + slot
    batch.query_starts.copy_(torch.arange(4))
    batch.header[[Header.NUM_ROWS, Header.NUM_TOKENS]] = 3
    return batch


@pytest.mark.parametrize("seed", range(5))
def test_a_guess_is_what_the_model_would_sample_at_its_place(seed: int) -> None:
    batch, draw = make_step(seed), torch.Generator().manual_seed(seed)
    rows = CpuGuesses(batch, (3, 3), GUESSES, ATTENTION, torch.float32)
    for guess in range(GUESSES):
        logits = 3 * torch.randn(3, VOCAB, generator=draw)
        lengths = torch.tensor([min(length + 1 + guess, MAX_LEN) for length in LENGTHS], dtype=torch.int32)
        known = replace(batch, context_lens=lengths, sampled_tokens=torch.zeros(3, dtype=torch.int32))
        sampling_oracle.sample(logits, known, 3)
        assert rows.sample(guess, logits).tolist() == known.sampled_tokens.tolist()


def test_automata_and_outputs_of_the_step_are_left_alone() -> None:
    """An automaton moves on by the model's own samples alone; logprobs are those of the model."""
    batch = make_step(0)
    batch.params[0, Param.AUTOMATON] = 1
    before = {name: getattr(batch, name).clone() for name in ("params", "sampled_tokens", "top_tokens", "header")}
    rows = CpuGuesses(batch, (3, 3), GUESSES, ATTENTION, torch.float32)
    assert rows.sample(0, torch.eye(3, VOCAB) * 100).tolist() == [0, 1, 2]
    for name, kept in before.items():
        assert torch.equal(getattr(batch, name), kept)


def test_tokens_that_a_head_has_not_are_never_guessed() -> None:
    tokens, batch = torch.tensor([3, 150, 8]), make_step(1)
    own = HeadTokens(tokens, VOCAB)
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 5.0, 1.0], [0.0, 0.5, 1.0]])
    wide = spread(logits, own)
    assert wide.shape == (3, VOCAB) and torch.equal(wide[:, tokens], logits)
    rows = CpuGuesses(batch, (3, 3), GUESSES, ATTENTION, torch.float32)
    assert {*rows.sample(1, logits, own).tolist()} <= {3, 150, 8}
    assert int(rows.sample(2, logits, own)[1]) == 3
