# SPDX-License-Identifier: Apache-2.0
"""Logprobs of prompts' own tokens against those of one pass by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blink import LLM, SamplingParams
from blink.outputs import PositionLogprobs


@torch.inference_mode()
def check_prompt_logprobs(
    model: Any, prompt: list[int], logprobs: list[PositionLogprobs | None] | None, num_top: int
) -> None:
    """Compare with the logprobs of one pass over the whole prompt."""
    assert logprobs is not None and len(logprobs) == len(prompt) and logprobs[0] is None
    positions = [position for position in logprobs[1:] if position is not None]
    expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    found = torch.tensor([position[token].logprob for token, position in zip(prompt[1:], positions, strict=True)])
    torch.testing.assert_close(found, expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    best = expected.topk(num_top)
    ranked = [{entry.rank: (token, entry.logprob) for token, entry in each.items()} for each in positions]
    tops = [[by_rank[rank] for rank in range(1, num_top + 1)] for by_rank in ranked]
    assert [[token for token, _ in top] for top in tops] == best.indices.tolist()
    scores = torch.tensor([[logprob for _, logprob in top] for top in tops]).view(len(positions), num_top)
    torch.testing.assert_close(scores, best.values, rtol=1e-4, atol=1e-4)


def check_prompt_logprobs_of_small_steps(path: Path, model: Any, num_top: int, device: str) -> None:
    """Score several prompts in one step of few tokens, which has fewer rows than sequences may run."""
    prompts = [[7, 1, 5, 9], [3, 8], [11, 2, 6, 4, 10], [7, 1, 12]]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num_top)
    options: dict[str, Any] = {"device": device, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(model=str(path), num_gpu_blocks_override=40, **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                check_prompt_logprobs(model, prompt, output.prompt_logprobs, num_top)
