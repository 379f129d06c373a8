# SPDX-License-Identifier: Apache-2.0
"""Texts that a model writes itself: by them it can be taught to predict as before, without text from elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.llm import LLM
from blink.sampling_params import SamplingParams

_PROMPT = 32  # tokens
_UNPROMPTED = 4  # one text in so many goes on from a single token
_SEQUENCES = 128  # at a time


def write_texts(model: str, begin: list[int], windows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return texts [number, tokens] of that shape that a model writes at temperature 1, after parts of windows.

    begin: what every text begins with; windows: [number, tokens], of a text that is like what the model reads.
    """
    count, length = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [1 if index % _UNPROMPTED == 0 else min(_PROMPT, length // 2) for index in range(count)]
    prompts = [begin + _draw(windows, size, generator) for size in sizes]
    params = [
        SamplingParams(max_tokens=length - len(prompt), temperature=1.0, seed=index, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    with LLM(model, max_model_len=length, max_num_seqs=min(_SEQUENCES, count)) as llm:
        found = llm.generate(prompts, params)
    return torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids for output in found])


def _draw(windows: Tensor, size: int, generator: torch.Generator) -> list[int]:
    row, place = (int(torch.randint(end, (), generator=generator)) for end in (len(windows), windows.shape[1] - size))
    return windows[row, place : place + size].tolist()
