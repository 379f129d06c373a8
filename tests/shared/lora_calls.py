# SPDX-License-Identifier: Apache-2.0
"""Small models with adapters of them, and calls of `LLM` under some, for tests on either device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from blink import LLM, LoRARequest, SamplingParams
from lora_adapters import find_targets, write_adapter
from model_families import save_model

PROMPTS = [[5] * 20 + [index + 30] * 3 for index in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Models:
    """A small model, and adapters of it."""

    def __init__(self, folder: Path) -> None:
        model = save_model("llama-3.1", folder / "base")
        self.base, self.folder, self.targets = folder / "base", folder, find_targets(model)
        self.adapters = [self.request(index) for index in range(8)]

    def request(self, index: int, name: str = "") -> LoRARequest:
        """Write an adapter of a seed; return how calls name it."""
        path = write_adapter(self.folder / (name or f"adapter-{index}"), self.targets, seed=index, rank=1 + index)
        return LoRARequest(name or f"adapter-{index}", index + 1, str(path))

    def open(self, **options: Any) -> LLM:
        sizes: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 100}
        sizes |= {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True}
        return LLM(model=str(self.base), **(sizes | options))


def generate(llm: LLM, prompts: list[list[int]], lora: Any = None) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora)
    return [output.outputs[0].token_ids for output in outputs]


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of which some begin alike."""
    draw = np.random.default_rng(3)
    lengths = draw.integers(2, 70, count)
    return [[5] * (index % 3 * 16) + draw.integers(3, 128, length).tolist() for index, length in enumerate(lengths)]
