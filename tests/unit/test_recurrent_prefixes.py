# SPDX-License-Identifier: Apache-2.0
"""A recurrent model gives the tokens of a cold run whatever the prefix cache holds, through a whole engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from model_families import save_model

_BLOCK, _LONGEST = 16, 75


def run(path: Path, prompts: list[list[int]], max_tokens: int = 4, **options: Any) -> list[tuple[list[int], int]]:
    """Return the tokens and the number of cached ones of each prompt, one after the other."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 200}
    sizes |= {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "block_size": _BLOCK}
    with LLM(model=str(path), **(sizes | options)) as llm:
        outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
    return [(output.outputs[0].token_ids, output.num_cached_tokens or 0) for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent")
    save_model("qwen3_5", path)
    return path


def test_prompts_that_end_around_a_snapshot_give_the_tokens_of_a_cold_run(model: Path) -> None:
    """The first leaves a snapshot at 64 tokens; others end 1 before, there, and 1 to 10 behind it."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 128) for _ in range(_LONGEST)]
    prompts = [prompt, *(prompt[:end] for end in (63, 64, *range(65, _LONGEST)))]
    warm, cold = run(model, prompts), run(model, prompts, enable_prefix_caching=False)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    assert [cached for _, cached in warm] == [0, 0, 48, *[64] * 10]
    assert not any(cached for _, cached in cold)


def test_a_prefix_without_a_snapshot_gets_one(model: Path) -> None:
    rng = random.Random(4)
    shared, tails = [rng.randrange(3, 128) for _ in range(40)], [[rng.randrange(3, 128)] * 20 for _ in range(3)]
    prompts = [[*shared, *tail] for tail in tails]
    warm, cold = run(model, prompts), run(model, prompts, enable_prefix_caching=False)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    assert [cached for _, cached in warm] == [0, 0, 32]
