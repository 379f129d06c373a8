# SPDX-License-Identifier: Apache-2.0
"""Greedy output of the default model equals what transformers generated when it was recorded, however it is batched."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from blink import LLM, SamplingParams
from blink.models.weights.files import default_model_path
from record_greedy import RECORDING

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not downloaded"),
]
RECORDED = json.loads(RECORDING.read_text())
PROMPTS: list[list[int]] = [entry["prompt"] for entry in RECORDED]
EXPECTED: list[list[int]] = [entry["output"] for entry in RECORDED]
LENGTHS = [len(prompt) for prompt in PROMPTS]
NEW_TOKENS = len(EXPECTED[0])


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    with LLM(max_model_len=400) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(roomy: LLM) -> list[list[int]]:
    return generate(roomy, PROMPTS)


def test_all_at_once(answers: list[list[int]]) -> None:
    assert answers == EXPECTED


@pytest.mark.usefixtures("answers")
def test_all_at_once_again_from_the_prefix_cache(roomy: LLM) -> None:
    before = roomy.stats()["prefix_hits"]
    assert generate(roomy, PROMPTS) == EXPECTED
    # All but the last, partial block of each prompt was computed by whoever ran before.
    assert roomy.stats()["prefix_hits"] - before >= sum((length - 1) // 16 * 16 for length in LENGTHS) * 0.9


def test_one_after_the_other(roomy: LLM) -> None:
    assert [generate(roomy, [prompt])[0] for prompt in PROMPTS[:3]] == EXPECTED[:3]


def test_all_at_once_in_small_chunks_with_preemption() -> None:
    # 21 blocks of 16 hold the longest sequence and hardly more, so that sequences are preempted and recomputed.
    with LLM(max_model_len=330, num_gpu_blocks_override=21, max_num_seqs=16, max_num_batched_tokens=48) as llm:
        assert generate(llm, PROMPTS) == EXPECTED
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["mixed_launches"] > sum(LENGTHS) // 48
    assert stats["num_blocks_used"] == 0
