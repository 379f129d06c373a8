# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals that of Hugging Face transformers, token for token, however the scheduler batches."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blink import LLM, SamplingParams
from blink.models.weights.files import resolve_model
from prose import LENGTHS, read_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 64
# Which of the 20 prompts also run alone, and through transformers' own loop; BLINK_EXHAUSTIVE=1: all.
ALONE = range(20) if os.environ.get("BLINK_EXHAUSTIVE") else (0, 19)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return read_prompts()


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    """The same file, loaded by transformers itself in float32."""
    path = resolve_model("")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@torch.inference_mode()
def generate_with_transformers(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
    return found[0, len(prompt) :].tolist()


@torch.inference_mode()
def continue_with_transformers(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """The most likely token after the prompt and after each token of the output: the output itself if it is greedy."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(roomy: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once; the first test holds them against transformers."""
    return generate(roomy, prompts)


def test_every_token_is_the_one_that_transformers_finds_most_likely(
    transformers_model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    found = [continue_with_transformers(transformers_model, p, e) for p, e in zip(prompts, expected, strict=True)]
    assert found == expected


def test_prompts_alone_are_what_transformers_generates(
    roomy: LLM, transformers_model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for i in ALONE:
        assert generate(roomy, [prompts[i]])[0] == expected[i]
        assert generate_with_transformers(transformers_model, prompts[i]) == expected[i]


def test_all_at_once_again_from_the_prefix_cache(
    roomy: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    before = roomy.stats()["prefix_hits"]
    assert generate(roomy, prompts) == expected
    # All but the last, partial block of each prompt was computed by whoever ran before.
    assert roomy.stats()["prefix_hits"] - before >= sum((length - 1) // 16 * 16 for length in LENGTHS) * 0.9


def test_all_at_once_in_small_chunks_with_preemption(prompts: list[list[int]], expected: list[list[int]]) -> None:
    # 60 blocks of 16 hold the longest sequence and little more, so that sequences are preempted and recomputed.
    with LLM(max_model_len=800, num_gpu_blocks_override=60, max_num_seqs=16, max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts) == expected
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["mixed_launches"] > sum(LENGTHS) // 48
    assert stats["num_blocks_used"] == 0


def test_an_engine_in_this_process_works_after_a_pause_longer_than_its_lease(
    prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with LLM(max_model_len=800, lease_timeout=0.5) as llm:
        for _ in range(2):
            time.sleep(1)
            assert generate(llm, prompts[:1]) == expected[:1]
