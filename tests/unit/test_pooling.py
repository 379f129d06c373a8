# SPDX-License-Identifier: Apache-2.0
"""Pooling a step's rows: prompts in one step and in chunks, with padding behind them, against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blink.kernels.batch import Batch, Header
from blink.kernels.operands import INVALID_LOGITS
from blink.kernels.pooling import Pooler

HIDDEN, SLOTS = 6, 4
Chunk = tuple[int, int, int]  # slot, first position, tokens


def make_batch(chunks: list[Chunk], num_rows: int, num_tokens: int) -> Batch:
    """Describe a step of some chunks; rows and tokens behind them are padding, as csrc/scheduler/compose.h has it."""
    batch = Batch.allocate(
        max_tokens=num_tokens, max_rows=num_rows, num_slots=SLOTS, max_blocks=1, max_model_len=99, vector_floats=8
    )
    token = 0
    for row, (slot, first, count) in enumerate(chunks):
        batch.row_slots[row], batch.query_starts[row] = slot, token
        batch.context_lens[row] = first + count
        batch.positions[token : token + count] = torch.arange(first, first + count)
        token += count
    batch.query_starts[len(chunks) :] = token
    batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = len(chunks), token
    return batch


def expected(kind: str, states: Tensor) -> Tensor:
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(3, 9), (4, 16)], ids=["full", "padded"])
def test_prompts_of_one_step(kind: str, num_rows: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    hidden = torch.full((num_tokens, HIDDEN), torch.nan)  # of padding
    hidden[:9] = torch.randn(9, HIDDEN)
    batch = make_batch([(2, 0, 4), (0, 0, 1), (1, 0, 4)], num_rows, num_tokens)
    Pooler(kind, None).pool(hidden, batch, num_rows)
    for row, states in enumerate(hidden[:9].split([4, 1, 4])):
        torch.testing.assert_close(batch.vectors[row, :HIDDEN], expected(kind, states))
    assert not batch.sampled_tokens[:3].any()


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_prompts_in_chunks_beside_others(kind: str) -> None:
    """Slot 0 is the one that padding rows name; slot 1 is taken by a second prompt when the first has ended."""
    torch.manual_seed(0)
    pooler = Pooler(kind, None)
    first, second, third = torch.randn(7, HIDDEN), torch.randn(5, HIDDEN), torch.randn(3, HIDDEN)
    steps = [
        ([(0, 0, 2), (1, 0, 3)], [first[:2], second[:3]]),
        ([(1, 3, 2), (0, 2, 1)], [second[3:], first[2:3]]),
        ([(1, 0, 3), (0, 3, 4)], [third, first[3:]]),
    ]
    found: list[Tensor] = []
    for chunks, states in steps:
        batch = make_batch(chunks, 4, 12)
        hidden = torch.full((12, HIDDEN), torch.inf)
        hidden[: sum(map(len, states))] = torch.cat(states)
        pooler.pool(hidden, batch, 4)
        found.append(batch.vectors[:, :HIDDEN].clone())
    torch.testing.assert_close(found[1][0], expected(kind, second))
    torch.testing.assert_close(found[2][0], expected(kind, third))
    torch.testing.assert_close(found[2][1], expected(kind, first))


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_what_is_computed_again_from_the_beginning_counts_once(kind: str) -> None:
    torch.manual_seed(0)
    pooler, states = Pooler(kind, None), torch.randn(5, HIDDEN)
    for chunk in ((3, 0, 4), (3, 0, 2), (3, 2, 3)):
        batch = make_batch([chunk], 1, chunk[2])
        pooler.pool(states[chunk[1] : chunk[1] + chunk[2]], batch, 1)
    torch.testing.assert_close(batch.vectors[0, :HIDDEN], expected(kind, states))


def test_a_classifier_makes_one_number_in_float32() -> None:
    torch.manual_seed(0)
    hidden, classifier = torch.randn(3, HIDDEN).bfloat16(), torch.randn(1, HIDDEN)
    batch = make_batch([(0, 0, 3)], 1, 3)
    Pooler("last", classifier).pool(hidden, batch, 1)
    torch.testing.assert_close(batch.vectors[0, :1], classifier @ hidden[2].float())
    assert not batch.vectors[0, 1:].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_vector_with_a_number_that_is_not_finite_is_none(wrong: float) -> None:
    hidden = torch.ones(4, HIDDEN)
    hidden[1, 2] = wrong
    batch = make_batch([(0, 0, 2), (1, 0, 2)], 2, 4)
    Pooler("last", None).pool(hidden, batch, 2)
    assert batch.sampled_tokens.tolist() == [INVALID_LOGITS, 0]
