# SPDX-License-Identifier: Apache-2.0
"""Logprobs of a prompt's own tokens, by the engine and by HTTP, against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from model_families import make_prompts, save_model
from prompt_logprobs import check_prompt_logprobs, check_prompt_logprobs_of_small_steps

NUM_TOP = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, save_model("llama-3.1", path)


def test_prompt_logprobs_of_prompts_in_one_small_step_equal_those_of_one_pass(saved: tuple[Path, Any]) -> None:
    check_prompt_logprobs_of_small_steps(*saved, NUM_TOP, "cpu")


@pytest.mark.parametrize(("num_blocks", "num_top"), [(200, NUM_TOP), (26, 0)], ids=["roomy", "preempting"])
def test_prompt_logprobs_of_chunked_prompts_equal_those_of_one_pass(
    saved: tuple[Path, Any], num_blocks: int, num_top: int
) -> None:
    path, model = saved
    prompts = [*make_prompts(), [5]]
    params = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=num_top, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(
        model=str(path), dtype="float32", skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=56,
        num_gpu_blocks_override=num_blocks,
    ) as llm:  # fmt: skip
        expected = llm.generate(prompts, plain, use_tqdm=False)
        # What is cached by now is computed again; every other sequence is not scored.
        found = llm.generate(prompts, [params, plain] * 5 + [params], use_tqdm=False)
        for_all = llm.generate(prompts, params, use_tqdm=False)
        assert (llm._client.stats()["num_preemptions"] > 0) == (num_blocks < 200)
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    assert [output.prompt_logprobs for output in found[1::2]] == [None] * 5
    for prompt, output in [*zip(prompts[::2], found[::2], strict=True), *zip(prompts, for_all, strict=True)]:
        check_prompt_logprobs(model, prompt, output.prompt_logprobs, num_top)
