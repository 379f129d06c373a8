# SPDX-License-Identifier: Apache-2.0
"""Logprobs of a prompt's own tokens, by the engine and by HTTP, against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM, SamplingParams
from blink.text.generation import TokenLogprob
from model_families import make_prompts, save_model

NUM_TOP = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, save_model("llama-3.1", path)


@torch.inference_mode()
def check_scores(model: Any, prompt: list[int], scores: list[TokenLogprob], num_top: int) -> None:
    """Compare with the logprobs of one pass over the whole prompt."""
    assert [entry.token for entry in scores] == prompt[1:]
    expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    found = torch.tensor([entry.logprob for entry in scores])
    torch.testing.assert_close(found, expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    best = expected.topk(num_top)
    assert [[token for token, _ in entry.top] for entry in scores] == best.indices.tolist()
    tops = torch.tensor([[logprob for _, logprob in entry.top] for entry in scores]).view(len(scores), num_top)
    torch.testing.assert_close(tops, best.values, rtol=1e-4, atol=1e-4)


def test_scores_of_prompts_in_one_small_step_equal_those_of_one_pass(saved: tuple[Path, Any]) -> None:
    """A step of few tokens has fewer rows than sequences may run."""
    path, model = saved
    prompts = [[7, 1, 5, 9], [3, 8], [11, 2, 6, 4, 10], [7, 1, 12]]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=NUM_TOP)
    with LLM(model=str(path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=40) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                check_scores(model, prompt, output.prompt_logprobs, NUM_TOP)


@pytest.mark.parametrize(("num_blocks", "num_top"), [(200, NUM_TOP), (26, 0)], ids=["roomy", "preempting"])
def test_scores_of_chunked_prompts_equal_those_of_one_pass(
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
    assert [output.prompt_logprobs for output in found[1::2]] == [[]] * 5
    for prompt, output in [*zip(prompts[::2], found[::2], strict=True), *zip(prompts, for_all, strict=True)]:
        check_scores(model, prompt, output.prompt_logprobs, num_top)
