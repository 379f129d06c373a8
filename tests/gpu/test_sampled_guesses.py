# SPDX-License-Identifier: Apache-2.0
"""Guesses of a draft head on a GPU that are sampled with the noise of the model's own samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from test_draft_heads_gpu import LENGTH, OPTIONS, PROMPT, VOCAB, ask, config_of
from test_guesses import ATTENTION, MIXED, find_guessed, make_step

from blink.kernels.batch import Batch, Param
from blink.kernels.cpu.guesses import CpuGuesses
from blink.kernels.gpu import guesses as gpu
from blink.kernels.guesses import HeadTokens
from eagle_heads import write_clockwork
from free_drafts import load_without_costs
from model_driver import set_params

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]
GUESSES, PADDING = 3, (21, 5)


def test_logits_of_heads_in_bf16_are_sampled_as_they_are() -> None:
    """tests/gpu/test_guesses.py has those in float32."""
    batch, num_tokens, num_rows = make_step(MIXED, 16, PADDING)
    for slot, text in enumerate(MIXED):
        set_params(batch, slot, {Param.NUM_PROMPT_TOKENS: text.num_prompt, Param.SEED_LOW: slot, Param.TEMPERATURE: 5})
    moved = {one.name: getattr(batch, one.name).to("cuda", copy=True) for one in dataclasses.fields(Batch)}
    bucket, tokens = (num_tokens + PADDING[0], num_rows + PADDING[1]), torch.arange(1, 500, 3)
    found = gpu.GpuGuesses(dataclasses.replace(batch, **moved), bucket, GUESSES, ATTENTION, torch.bfloat16)
    expected = CpuGuesses(batch, (num_tokens, num_rows), GUESSES, ATTENTION, torch.bfloat16)
    guessed = find_guessed(MIXED, batch, num_rows)
    logits = torch.randn(bucket[1], len(tokens), generator=torch.Generator().manual_seed(2)).bfloat16()
    sampled = found.sample(0, logits.cuda(), HeadTokens(tokens.cuda(), 500)).cpu()
    assert sampled[guessed].tolist() == expected.sample(0, logits[guessed], HeadTokens(tokens, 500)).tolist()
    assert len({*sampled[guessed].tolist()}) > 2


def test_a_head_samples_with_the_noise_of_its_model(tmp_path: Path) -> None:
    """So hot that the likeliest token is hardly ever sampled: a head whose logits are the model's guesses what is."""
    model, head = write_clockwork(tmp_path, VOCAB, range(VOCAB))
    params = {"temperature": 8.0, "seed": 3}
    with load_without_costs(str(model), **OPTIONS) as plain:
        expected = ask(plain, [PROMPT], **params)
    with load_without_costs(str(model), **OPTIONS, speculative_config=config_of(head)) as drafting:
        assert ask(drafting, [PROMPT], **params) == expected
        assert int(drafting.stats()["accepted_tokens"]) > LENGTH * 2 // 3
