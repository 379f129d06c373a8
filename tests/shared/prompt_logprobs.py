# SPDX-License-Identifier: Apache-2.0
"""Logprobs of prompts' own tokens against those of one pass by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blink import LLM, SamplingParams
from blink.text.generation import TokenLogprob


@torch.inference_mode()
def check_prompt_logprobs(model: Any, prompt: list[int], logprobs: list[TokenLogprob], num_top: int) -> None:
    """Compare with the logprobs of one pass over the whole prompt."""
    assert [entry.token for entry in logprobs] == prompt[1:]
    expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    found = torch.tensor([entry.logprob for entry in logprobs])
    torch.testing.assert_close(found, expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    best = expected.topk(num_top)
    assert [[token for token, _ in entry.top] for entry in logprobs] == best.indices.tolist()
    tops = torch.tensor([[logprob for _, logprob in entry.top] for entry in logprobs]).view(len(logprobs), num_top)
    torch.testing.assert_close(tops, best.values, rtol=1e-4, atol=1e-4)


def check_prompt_logprobs_of_small_steps(path: Path, model: Any, num_top: int, device: str) -> None:
    """Score several prompts in one step of few tokens, which has fewer rows than sequences may run."""
    prompts = [[7, 1, 5, 9], [3, 8], [11, 2, 6, 4, 10], [7, 1, 12]]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_top)
    options: dict[str, Any] = {"device": device, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(model=str(path), num_gpu_blocks_override=40, **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                check_prompt_logprobs(model, prompt, output.prompt_logprobs, num_top)
