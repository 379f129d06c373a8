# SPDX-License-Identifier: Apache-2.0
"""Sampling by a cluster and by a block against the plain reference: same parameters, logits and seeds, same tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import sampling_oracle
from blink.kernels.batch import Batch, Header, Param

gpu_sampling = pytest.importorskip("blink.kernels.gpu.sampling")
pytestmark = pytest.mark.usefixtures("_each_sampling_group")

NEUTRAL: dict[Param, float] = {
    Param.TOP_P: 1.0,
    Param.REPETITION_PENALTY: 1.0,
    Param.NUM_LOGPROBS: -1,
}
MAX_LEN = 2100


def make_batch(rows: list[dict[Param, float]], vocab_size: int, *, seed: int = 1) -> Batch:
    """Make a CPU batch of one row per parameter set, of various lengths; the last row is padding beyond the header."""
    num_rows = len(rows)
    batch = Batch.allocate(
        max_tokens=1, max_rows=num_rows + 1, num_slots=num_rows + 3, max_blocks=1, max_model_len=MAX_LEN
    )
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    # Few different tokens, so that counts exceed 1.
    batch.tokens.copy_(torch.randint(0, min(vocab_size, 300), batch.tokens.shape, generator=generator))
    batch.header[Header.NUM_ROWS] = num_rows
    slots = rng.sample(range(num_rows + 3), num_rows)
    for row, (slot, values) in enumerate(zip(slots, rows, strict=True)):
        context_len = rng.choice([2, 9, 400, 1500])
        words = {Param.NUM_PROMPT_TOKENS: context_len // 2, Param.SEED_LOW: row - 3, Param.SEED_HIGH: -row, **NEUTRAL}
        for param, value in {**words, **values}.items():
            (batch.params_f32 if param <= Param.FREQUENCY_PENALTY else batch.params)[slot, param] = value
        batch.row_slots[row] = slot
        batch.context_lens[row] = context_len
        batch.stop_tokens[slot, :4] = torch.tensor(rng.sample(range(vocab_size), 4))
        biased = rng.sample(range(vocab_size), min(vocab_size, 300))
        batch.bias_tokens[slot, : len(biased)] = torch.tensor(biased)
        batch.bias_values[slot, : len(biased)] = torch.randn(len(biased), generator=generator) * 4
    return batch


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, *, scale: float = 2.5, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(dtype)


def move(batch: Batch, device: torch.device) -> Batch:
    return Batch(**{name: getattr(batch, name).clone().to(device) for name in Batch.__dataclass_fields__})


def assert_equals_reference(batch: Batch, logits: Tensor, device: torch.device) -> None:
    """Sample on the device and with the reference, and compare all outputs, also those that must not be written."""
    for output in (batch.sampled_tokens, batch.top_tokens):
        output.fill_(-7)
    found = move(batch, device)
    num_rows = logits.shape[0]
    gpu_sampling.sample(logits.to(device), found, num_rows)
    sampling_oracle.sample(logits, batch, num_rows)
    assert found.sampled_tokens.tolist() == batch.sampled_tokens.tolist()
    assert found.top_tokens.tolist() == batch.top_tokens.tolist()
    for name in ("sampled_logprobs", "top_logprobs"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(batch, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 2048, 5003])
def test_greedy_rows_take_the_first_largest_logit(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = make_logits(6, vocab_size, dtype)
    logits[1, [3, 5]] = logits[1].max() + 1
    logits[2] = 0
    logits[3] = -torch.inf
    logits[3, -1] = -1e30
    assert_equals_reference(make_batch([{}] * 5, vocab_size), logits, device)


@pytest.mark.parametrize("vocab_size", [6, 130, 4097])
def test_temperature_draws_the_tokens_of_the_reference(vocab_size: int, device: torch.device) -> None:
    rows = [{Param.TEMPERATURE: value} for value in (0.3, 1.0, 2.5, 1e-6, 1.0)]
    assert_equals_reference(make_batch(rows, vocab_size), make_logits(5, vocab_size, torch.float32), device)


TRUNCATIONS: list[dict[Param, float]] = [
    {Param.TOP_K: 1},
    {Param.TOP_K: 40},
    {Param.TOP_K: 100_000},
    {Param.TOP_P: 0.9},
    {Param.TOP_P: 0.01},
    {Param.MIN_P: 0.05},
    {Param.TOP_K: 50, Param.TOP_P: 0.8},
    {Param.TOP_K: 700, Param.TOP_P: 0.95, Param.MIN_P: 0.001},
]


@pytest.mark.parametrize("vocab_size", [50, 9001])
@pytest.mark.parametrize("scale", [0.05, 3.0, 60.0])
def test_truncated_rows_draw_the_tokens_of_the_reference(vocab_size: int, scale: float, device: torch.device) -> None:
    rows = [{Param.TEMPERATURE: 1.2, **values} for values in TRUNCATIONS]
    logits = make_logits(len(rows), vocab_size, torch.float32, scale=scale)
    assert_equals_reference(make_batch(rows, vocab_size), logits, device)


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 151_936])
def test_truncated_rows_of_a_whole_vocabulary_draw_the_tokens_of_the_reference(
    vocab_size: int, device: torch.device
) -> None:
    rows = [{Param.TEMPERATURE: 0.7, **values} for values in TRUNCATIONS * 2]
    logits = make_logits(len(rows), vocab_size, torch.bfloat16)
    logits[3], logits[5, 7] = float("nan"), float("inf")
    logits[9, vocab_size // 2 :] = -torch.inf
    assert_equals_reference(make_batch(rows, vocab_size), logits, device)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (5000, 1.0), (9000, 1.0), (0, 0.3), (0, 0.9999)])
@pytest.mark.parametrize("levels", [1, 5, 100_000])
def test_only_tokens_at_or_above_the_threshold_of_the_reference_are_drawn(
    top_k: int, top_p: float, levels: int, device: torch.device
) -> None:
    # With few levels, more logits are equal than the search holds at once.
    vocab_size = 9001
    logits = (torch.rand(1, vocab_size, generator=torch.Generator().manual_seed(5)) * levels).floor() / levels
    rows = [{Param.TEMPERATURE: 1.0, Param.TOP_K: top_k, Param.TOP_P: top_p}] * 4
    assert_equals_reference(make_batch(rows, vocab_size), logits.expand(4, -1).contiguous(), device)


def test_penalties_bias_and_minimum_length_change_what_the_reference_changes(device: torch.device) -> None:
    changes: list[dict[Param, float]] = [
        {Param.REPETITION_PENALTY: 1.3},
        {Param.REPETITION_PENALTY: 0.6, Param.FREQUENCY_PENALTY: 0.4},
        {Param.PRESENCE_PENALTY: -1.5},
        {Param.FREQUENCY_PENALTY: 1.1, Param.PRESENCE_PENALTY: 0.5},
        {Param.NUM_BIASES: 300},
        {Param.NUM_BIASES: 1, Param.MIN_TOKENS: 5000, Param.NUM_STOP_TOKENS: 4},
        {Param.MIN_TOKENS: 1, Param.NUM_STOP_TOKENS: 4},
    ]
    full = {name: value for change in changes for name, value in change.items()}
    rows = [
        {**change, **values}
        for change in [*changes, full]
        for values in ({}, {Param.TEMPERATURE: 0.9, Param.TOP_K: 60})
    ]
    assert_equals_reference(make_batch(rows, 4999), make_logits(len(rows), 4999, torch.float32), device)


def test_stop_tokens_of_a_text_that_is_too_short_never_win(device: torch.device) -> None:
    logits = make_logits(2, 333, torch.float32)
    batch = make_batch([{Param.MIN_TOKENS: 5000, Param.NUM_STOP_TOKENS: 4}] * 2, 333)
    for row in range(2):
        logits[row, batch.stop_tokens[batch.row_slots[row], :4].long()] = 50.0
    assert_equals_reference(batch, logits, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [4500, 4501])
def test_logprobs_are_those_of_the_unchanged_logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    rows: list[dict[Param, float]] = [
        {Param.NUM_LOGPROBS: 0},
        {Param.NUM_LOGPROBS: 20},
        {Param.NUM_LOGPROBS: 3, Param.TEMPERATURE: 1.0},
        {Param.NUM_LOGPROBS: 5, Param.TEMPERATURE: 0.8, Param.TOP_P: 0.7, Param.FREQUENCY_PENALTY: 1.0},
        {},
    ]
    # Distinct in bfloat16 near the top, since the order of equal logits is not defined.
    levels = torch.arange(vocab_size).float() * -0.01
    levels[:30] = torch.arange(30) * -0.5 + 30
    order = [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(row)) for row in range(len(rows))]
    logits = torch.stack([levels[permutation] for permutation in order]).to(dtype)
    assert_equals_reference(make_batch(rows, vocab_size), logits, device)


def test_a_large_bucket_with_few_rows_gives_the_same_tokens(device: torch.device) -> None:
    vocab_size = 300
    rows: list[dict[Param, float]] = [{}, {Param.TEMPERATURE: 1.0}, {Param.TEMPERATURE: 1.0, Param.TOP_K: 9}] * 14
    batch = make_batch(rows, vocab_size)
    batch.header[Header.NUM_ROWS] = 5
    assert_equals_reference(batch, make_logits(len(rows), vocab_size, torch.float32), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_rows_of_all_kinds_take_the_tokens_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    kinds: list[dict[Param, float]] = [
        {},
        {Param.TEMPERATURE: 0.8},
        {Param.TEMPERATURE: 1.3, Param.TOP_P: 0.9},
        {Param.TEMPERATURE: 0.7, Param.TOP_K: 30, Param.MIN_P: 0.01},
        {Param.REPETITION_PENALTY: 1.2},
        {Param.NUM_LOGPROBS: 1},
        {Param.TEMPERATURE: 1.0, Param.TOP_P: 0.95, Param.FREQUENCY_PENALTY: 0.4, Param.NUM_LOGPROBS: 0},
    ]
    logits = make_logits(len(kinds) * 15, 32_000, dtype)
    logits[5 :: len(kinds), 77] = 20.0  # the best one: equal ones have no order
    assert_equals_reference(make_batch(kinds * 15, 32_000), logits, device)


BROKEN = {"nan": torch.nan, "inf": torch.inf, "nothing": -torch.inf}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("vocab_size", [70, 5003])
def test_a_row_without_a_finite_largest_logit_gets_no_token_and_the_others_theirs(
    vocab_size: int, broken: str, device: torch.device
) -> None:
    kinds: list[dict[Param, float]] = [
        {},
        {Param.REPETITION_PENALTY: 1.5},
        {Param.TEMPERATURE: 1.0},
        {Param.TEMPERATURE: 1.0, Param.TOP_K: 9},
        {Param.TEMPERATURE: 1.0, Param.TOP_P: 0.9, Param.MIN_P: 0.1},
    ]
    logits = make_logits(10, vocab_size, torch.float32)
    logits[:5] = -torch.inf if broken == "nothing" else logits[:5]
    logits[:5, vocab_size // 3] = BROKEN[broken]
    batch = make_batch([*kinds, *kinds], vocab_size)
    assert_equals_reference(batch, logits, device)
    assert batch.sampled_tokens[:5].tolist() == [-1] * 5
    assert (batch.sampled_tokens[5:10] >= 0).all()


def test_biases_that_hide_all_tokens_or_are_no_numbers_leave_no_token(device: torch.device) -> None:
    values = {Param.NUM_BIASES: 50, Param.TEMPERATURE: 1.0, Param.MIN_P: 0.1}
    batch = make_batch([values, values, {**values, Param.NUM_BIASES: 0}], 50)
    batch.bias_values[batch.row_slots[0], :50] = torch.nan
    batch.bias_values[batch.row_slots[1], :50] = -torch.inf
    assert_equals_reference(batch, make_logits(3, 50, torch.float32), device)
    assert (batch.sampled_tokens[:3] >= 0).tolist() == [False, False, True]
