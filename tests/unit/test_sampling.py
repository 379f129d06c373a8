# SPDX-License-Identifier: Apache-2.0
"""Sampling against naive float64 implementations of the same rules, and chi-square tests of what is drawn."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from blink.kernels.batch import Batch, Header, Param
from blink.kernels.operands import INVALID_LOGITS
from blink.kernels.sampling import sample
from model_driver import set_params
from sampling_floor import find_threshold

VOCAB = 60


def make_batch(num_rows: int, params: Mapping[Param, float], *, num_prompt: int = 4, context_len: int = 9) -> Batch:
    """Make rows of the same parameters and length; row r uses slot num_rows - 1 - r and seed r."""
    batch = Batch.allocate(max_tokens=1, max_rows=num_rows, num_slots=num_rows, max_blocks=1, max_model_len=32)
    generator = torch.Generator().manual_seed(20)
    batch.tokens.copy_(torch.randint(0, VOCAB, batch.tokens.shape, generator=generator))
    batch.header[Header.NUM_ROWS] = num_rows
    for row in range(num_rows):
        slot = num_rows - 1 - row
        set_params(batch, slot, {Param.NUM_PROMPT_TOKENS: num_prompt, Param.SEED_LOW: row, **params})
        batch.row_slots[row] = slot
        batch.context_lens[row] = context_len
    return batch


def make_logits(*shape: int, seed: int = 21) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def keep_naively(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that vLLM's sampler keeps: min-p, then top-k, then top-p, each on what the last one left."""
    weights = {token: math.exp(logit) for token, logit in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])
    order = [token for token in order if weights[token] >= min_p * weights[order[0]]]
    order = order[: top_k or None]
    total, before, kept = sum(weights[token] for token in order), 0.0, set()
    for token in order:
        if before / total < top_p:
            kept.add(token)
        before += weights[token]
    return kept


def assert_drawn_from(counts: Counter[int], probabilities: dict[int, float]) -> None:
    """Chi-square test; tokens expected fewer than 5 times are counted together."""
    assert set(counts) <= set(probabilities)
    total = sum(counts.values())
    cells: list[tuple[float, int]] = []
    rare_expected, rare_found = 0.0, 0
    for token, probability in probabilities.items():
        if probability * total >= 5:
            cells.append((probability * total, counts[token]))
        else:
            rare_expected, rare_found = rare_expected + probability * total, rare_found + counts[token]
    if rare_expected >= 5:
        cells.append((rare_expected, rare_found))
    statistic = sum((found - expected) ** 2 / expected for expected, found in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile that true samples exceed once in 100,000 seeds.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab_size", [VOCAB, 5000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 0.001, 0.0),
        (0, 1.0, 0.1),
        (20, 0.9, 0.0),
        (0, 0.9, 0.2),
        (7, 0.5, 0.05),
        (9999, 0.99, 0.0),
    ],
)
def test_the_kept_set_equals_the_naive_one(seed: int, vocab_size: int, top_k: int, top_p: float, min_p: float) -> None:
    # Flat logits in the large vocabulary, so that top-p needs more tokens than the first look takes.
    logits = make_logits(vocab_size, seed=seed) * (1.0 if vocab_size == VOCAB else 0.1)
    threshold = find_threshold(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = set((logits >= threshold).nonzero()[:, 0].tolist())
    assert kept == keep_naively(logits.double().tolist(), top_k, top_p, min_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.5)])
def test_equal_logits_are_kept_together(top_k: int, top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    threshold = find_threshold(logits, top_k=top_k, top_p=top_p, min_p=0)
    assert (logits >= threshold).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    "params",
    [
        {Param.TEMPERATURE: 1.0},
        {Param.TEMPERATURE: 0.7},
        {Param.TEMPERATURE: 2.5, Param.TOP_K: 12},
        {Param.TEMPERATURE: 1.0, Param.TOP_P: 0.85},
        {Param.TEMPERATURE: 1.5, Param.MIN_P: 0.1},
        {Param.TEMPERATURE: 2.0, Param.TOP_K: 30, Param.TOP_P: 0.9, Param.MIN_P: 0.02},
    ],
    ids=lambda params: "-".join(param.name.lower() for param in params),
)
def test_tokens_are_drawn_with_the_probabilities_of_the_truncated_softmax(params: dict[Param, float]) -> None:
    num_rows = 3000
    batch, logits = make_batch(num_rows, params), make_logits(VOCAB)
    sample(logits.expand(num_rows, -1), batch, num_rows)
    scaled = (logits.double() / params[Param.TEMPERATURE]).tolist()
    kept = keep_naively(
        scaled, int(params.get(Param.TOP_K, 0)), params.get(Param.TOP_P, 1.0), params.get(Param.MIN_P, 0.0)
    )
    total = sum(math.exp(scaled[token]) for token in kept)
    probabilities = {token: math.exp(scaled[token]) / total for token in kept}
    assert_drawn_from(Counter(batch.sampled_tokens.tolist()), probabilities)


def test_steps_of_one_sequence_draw_independently() -> None:
    batch, logits = make_batch(2000, {Param.TEMPERATURE: 1.0, Param.SEED_LOW: 5}), make_logits(VOCAB)
    batch.context_lens.copy_(torch.arange(4, 2004))
    sample(logits.expand(2000, -1), batch, 2000)
    probabilities = dict(enumerate(logits.double().softmax(0).tolist()))
    assert_drawn_from(Counter(batch.sampled_tokens.tolist()), probabilities)


@pytest.mark.parametrize("params", [{Param.TOP_K: 20}, {Param.TOP_P: 0.95}, {}])
def test_a_token_depends_on_its_seed_and_length_but_not_on_the_batch(params: dict[Param, float]) -> None:
    logits = make_logits(8, VOCAB)
    together = make_batch(8, {**params, Param.TEMPERATURE: 1.3, Param.SEED_HIGH: -3})
    sample(logits, together, 8)
    for row in range(8):
        alone = make_batch(1, {**params, Param.TEMPERATURE: 1.3, Param.SEED_LOW: row, Param.SEED_HIGH: -3})
        sample(logits[row : row + 1], alone, 1)
        assert alone.sampled_tokens[0] == together.sampled_tokens[row]


def test_each_word_of_the_seed_and_the_length_changes_the_draws() -> None:
    def draw(params: dict[Param, float], context_len: int) -> list[int]:
        batch = make_batch(40, {Param.TEMPERATURE: 3.0, **params}, context_len=context_len)
        sample(make_logits(VOCAB).expand(40, -1), batch, 40)
        return batch.sampled_tokens.tolist()

    draws = [draw({}, 9), draw({Param.SEED_HIGH: 1}, 9), draw({}, 10)]
    assert len({tuple(tokens) for tokens in draws}) == 3


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [9, 4, 30]] = 2.0
    for params in ({}, {Param.NUM_LOGPROBS: 0}):
        batch = make_batch(2, params)
        sample(logits, batch, 2)
        assert batch.sampled_tokens.tolist() == [4, 0]


def test_rows_behind_the_headers_count_are_not_written() -> None:
    batch = make_batch(4, {})
    batch.header[Header.NUM_ROWS] = 2
    batch.sampled_tokens.fill_(-7)
    sample(make_logits(4, VOCAB), batch, 4)
    assert batch.sampled_tokens[2:].tolist() == [-7, -7]
    assert -7 not in batch.sampled_tokens[:2].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_bias_and_minimum_length_equal_the_naive_rules(dtype: torch.dtype) -> None:
    num_prompt, context_len = 6, 20
    for seed in range(20):
        rng = random.Random(seed)
        rules = {
            Param.REPETITION_PENALTY: rng.choice([1.0, 0.5, 1.7]),
            Param.PRESENCE_PENALTY: rng.choice([0.0, -1.5, 2.0]),
            Param.FREQUENCY_PENALTY: rng.choice([0.0, -0.5, 1.25]),
            Param.MIN_TOKENS: rng.choice([0, 14, 15]),
        }
        biases = {token: rng.uniform(-5, 5) for token in rng.sample(range(VOCAB), rng.choice([0, 3, 40]))}
        stops = rng.sample(range(VOCAB), 5)
        batch = make_batch(1, {**rules, Param.NUM_LOGPROBS: 0}, num_prompt=num_prompt, context_len=context_len)
        batch.tokens[0] = torch.tensor([rng.randrange(VOCAB // 3) for _ in range(32)])
        batch.params[0, Param.NUM_STOP_TOKENS] = len(stops)
        batch.stop_tokens[0, : len(stops)] = torch.tensor(stops)
        batch.params[0, Param.NUM_BIASES] = len(biases)
        batch.bias_tokens[0, : len(biases)] = torch.tensor(list(biases))
        batch.bias_values[0, : len(biases)] = torch.tensor(list(biases.values()))
        logits = make_logits(1, VOCAB, seed=100 + seed).to(dtype)
        sample(logits, batch, 1)
        history = batch.tokens[0, :context_len].tolist()
        expected = adjust_naively(logits[0].double().tolist(), history, num_prompt, rules, biases, stops)
        assert int(batch.sampled_tokens[0]) == max(range(VOCAB), key=lambda token: expected[token])


def adjust_naively(
    logits: list[float],
    history: list[int],
    num_prompt: int,
    rules: dict[Param, float],
    biases: dict[int, float],
    stops: list[int],
) -> list[float]:
    adjusted = [logit + biases.get(token, 0.0) for token, logit in enumerate(logits)]
    generated = Counter(history[num_prompt:])
    for token in range(VOCAB):
        if token in history:
            penalty = rules[Param.REPETITION_PENALTY]
            adjusted[token] *= 1 / penalty if adjusted[token] > 0 else penalty
        adjusted[token] -= rules[Param.FREQUENCY_PENALTY] * generated[token]
        adjusted[token] -= rules[Param.PRESENCE_PENALTY] * (generated[token] > 0)
        if token in stops and len(history) - num_prompt < rules[Param.MIN_TOKENS]:
            adjusted[token] = -math.inf
    return adjusted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_unchanged_logits(temperature: float) -> None:
    params = {Param.TEMPERATURE: temperature, Param.TOP_K: 3, Param.FREQUENCY_PENALTY: 2.0, Param.NUM_LOGPROBS: 5}
    batch, logits = make_batch(4, params), make_logits(4, VOCAB)
    unchanged = logits.clone()
    sample(logits, batch, 4)
    assert torch.equal(logits, unchanged)
    logprobs = logits.double().log_softmax(-1)
    sampled = logprobs.gather(1, batch.sampled_tokens[:, None].long())[:, 0]
    torch.testing.assert_close(batch.sampled_logprobs.double(), sampled, rtol=1e-5, atol=1e-5)
    values, tokens = logprobs.topk(5)
    torch.testing.assert_close(batch.top_logprobs[:, :5].double(), values, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch.top_tokens[:, :5].long(), tokens)
    assert not batch.top_tokens[:, 5:].any()


def test_plain_greedy_rows_get_the_same_token_beside_special_rows() -> None:
    logits = make_logits(6, VOCAB)
    plain = make_batch(6, {})
    sample(logits, plain, 6)
    mixed = make_batch(6, {})
    set_params(mixed, 0, {Param.TEMPERATURE: 1.0, Param.TOP_P: 0.5})  # slot 0 is row 5
    sample(logits, mixed, 6)
    assert plain.sampled_tokens[:5].tolist() == mixed.sampled_tokens[:5].tolist() == logits[:5].argmax(-1).tolist()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {Param.REPETITION_PENALTY: 1.5},
        {Param.TEMPERATURE: 1.0},
        {Param.TEMPERATURE: 1.0, Param.MIN_P: 0.1, Param.TOP_P: 0.9, Param.NUM_LOGPROBS: 3},
    ],
)
def test_a_row_without_a_finite_largest_logit_gets_no_token_and_the_others_theirs(
    params: dict[Param, float], broken: float
) -> None:
    batch, untouched = make_batch(3, params), make_batch(3, params)
    logits = make_logits(3, VOCAB)
    sample(logits, untouched, 3)
    logits[1] = -math.inf
    logits[1, 7] = broken
    sample(logits, batch, 3)
    tokens = untouched.sampled_tokens.tolist()
    assert batch.sampled_tokens.tolist() == [tokens[0], INVALID_LOGITS, tokens[2]] and min(tokens) >= 0
