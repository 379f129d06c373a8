# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals that of Hugging Face transformers, token for token, however the scheduler batches: all of it.

The gate compares a part of it with a recording: test_greedy_recorded.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from blink import LLM, SamplingParams
from prose import LENGTHS, read_prompts
from record_greedy import RECORDING, generate_with_transformers, load_transformers_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return read_prompts()


@pytest.fixture(scope="module")
def transformers_model() -> Any:
    return load_transformers_model()


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
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generate(roomy, [prompt])[0] == tokens
        assert generate_with_transformers(transformers_model, prompt, NEW_TOKENS)[0] == tokens


def test_the_recording_for_the_gate_is_what_transformers_generates(transformers_model: Any) -> None:
    for entry in json.loads(RECORDING.read_text()):
        found, _ = generate_with_transformers(transformers_model, entry["prompt"], len(entry["output"]))
        assert found == entry["output"]


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
