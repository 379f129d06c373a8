# SPDX-License-Identifier: Apache-2.0
"""Random rows to sample, and the comparison of what is sampled with the plain PyTorch oracle."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Header, Param
from model_driver import set_params
from sampling_oracle import sample as sample_plainly

ROWS, MAX_LEN = 20, 600
Sample = Callable[[Tensor, Batch], None]


def make_params(rng: random.Random) -> dict[Param, float]:
    """Return parameters of which each is as often off as on."""
    return {
        Param.TEMPERATURE: rng.choice([0.0, 1e-6, 0.1, 0.7, 1.0, 2.5, 100.0]),
        Param.TOP_P: rng.choice([1.0, 1.0, 0.95, 0.5, 0.02]),
        Param.MIN_P: rng.choice([0.0, 0.0, 0.001, 0.1, 1.0]),
        Param.TOP_K: rng.choice([0, -1, 1, 7, 50, 700, 100_000]),
        Param.REPETITION_PENALTY: rng.choice([1.0, 1.0, 0.6, 1.3]),
        Param.PRESENCE_PENALTY: rng.choice([0.0, 0.0, -1.5, 2.0]),
        Param.FREQUENCY_PENALTY: rng.choice([0.0, 0.0, -0.25, 1.75]),
        Param.NUM_LOGPROBS: rng.choice([-1, -1, 0, 1, 5, 20]),
        Param.MIN_TOKENS: rng.choice([0, 0, 1000]),
        Param.SEED_LOW: rng.randrange(-(2**31), 2**31),
        Param.SEED_HIGH: rng.randrange(-(2**31), 2**31),
    }


def make_reasoning(rng: random.Random, num_generated: int, vocab_size: int) -> dict[Param, int]:
    """Return a limit of reasoning that is near, or none."""
    if rng.random() < 0.4:
        return {}
    return {
        Param.REASONING_LIMIT: max(num_generated + 1 - rng.randrange(-1, 10), 0),
        Param.REASONING_OPEN: rng.choice([-1, rng.randrange(60)]),
        Param.REASONING_CLOSE: rng.randrange(vocab_size),
    }


def make_rows(seed: int) -> tuple[Tensor, Batch]:
    """Make logits of many shapes, and a batch of as many rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab_size = rng.choice([60, 333, 1030, 5000])
    batch = Batch.allocate(max_tokens=1, max_rows=ROWS, num_slots=ROWS, max_blocks=1, max_model_len=MAX_LEN)
    batch.tokens.copy_(torch.randint(0, min(vocab_size, 80), batch.tokens.shape, generator=generator))
    batch.header[Header.NUM_ROWS] = ROWS
    logits = torch.randn(ROWS, vocab_size, generator=generator)
    for row, slot in enumerate(rng.sample(range(ROWS), ROWS)):
        logits[row] *= rng.choice([0.05, 1.0, 3.0, 40.0])
        if rng.random() < 0.3:
            logits[row] = logits[row].bfloat16().float()  # equal ones
        if rng.random() < 0.2:
            logits[row, rng.randrange(vocab_size) :] = -torch.inf
        if rng.random() < 0.1:
            logits[row, rng.randrange(vocab_size)] = rng.choice([90.0, torch.inf, torch.nan])
        length = rng.randrange(2, MAX_LEN)
        num_prompt = rng.randrange(1, length)
        stops, biases = rng.sample(range(vocab_size), 5), rng.sample(range(vocab_size), rng.choice([0, 0, 3, 40]))
        words = {Param.NUM_PROMPT_TOKENS: num_prompt, Param.NUM_STOP_TOKENS: 5, Param.NUM_BIASES: len(biases)}
        words |= make_reasoning(random.Random(f"{seed} {row}"), length - num_prompt, vocab_size)
        params = make_params(rng)
        if row % 2 and 0 < params[Param.NUM_LOGPROBS] <= len(biases):
            words[Param.NAMED_LOGPROBS] = int(params[Param.NUM_LOGPROBS])
        set_params(batch, slot, {**params, **words})
        batch.row_slots[row], batch.context_lens[row] = slot, length
        batch.stop_tokens[slot, :5] = torch.tensor(stops)
        batch.bias_tokens[slot, : len(biases)] = torch.tensor(biases, dtype=torch.int32)
        batch.bias_values[slot, : len(biases)] = torch.rand(len(biases), generator=generator) * 20 - 10
    return logits, batch


def check_rows(
    sample: Sample, seed: int, dtype: torch.dtype = torch.float32, *, count: int = ROWS, is_exact: bool = True
) -> None:
    """Compare tokens and logprobs of the first rows of one batch with the oracle's.

    Tokens are the oracle's: only where two with noise are as near as the roundings of two logarithms (1e-6) could
    they differ. Logprobs are float64's, rounded once, where masses are added up in that (is_exact).
    """
    logits, batch = make_rows(seed)
    logits = logits[:count].to(dtype)
    _, expected = make_rows(seed)
    batch.header[Header.NUM_ROWS] = count
    sample(logits, batch)
    sample_plainly(logits, expected, count)
    assert batch.sampled_tokens.tolist() == expected.sampled_tokens.tolist(), seed
    reference = logits.double().log_softmax(-1)
    for row in range(count):
        slot, token = int(batch.row_slots[row]), int(batch.sampled_tokens[row])
        wanted = int(batch.params[slot, Param.NUM_LOGPROBS])
        if wanted < 0 or token < 0:
            continue
        is_named = bool(batch.params[slot, Param.NAMED_LOGPROBS])
        named = batch.bias_tokens[slot, :wanted].tolist() if is_named else None
        found = torch.cat((batch.sampled_logprobs[row : row + 1], batch.top_logprobs[row, :wanted]))
        if not logits[row].max().isfinite():  # a hidden stop token
            assert found.isnan().all() and batch.top_tokens[row, :wanted].tolist() == (named or [*range(wanted)])
            continue
        best = named or logits[row].sort(descending=True, stable=True).indices[:wanted].tolist()  # the lowest of equals
        assert batch.top_tokens[row, :wanted].tolist() == best, (seed, row)
        exact = reference[row, [token, *best]].float()
        rtol, atol = (1.2e-7, 1e-13) if is_exact else (2e-6, 8e-6)  # 8e-6: sums of float32
        torch.testing.assert_close(found, exact, rtol=rtol, atol=atol)
