# SPDX-License-Identifier: Apache-2.0
"""A model with an adapter and the model that the adapter is merged into give the same tokens, in each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blink import LLM, LoRARequest, SamplingParams
from lora_adapters import find_targets, merge, write_adapter
from lora_calls import make_prompts
from model_families import FAMILIES, save_model

# All of the family's matrices that adapters may change: of a mixture of experts those of attention, and what is dense.
DENSE = [
    "llama-3.1", "llama-biased", "qwen2", "qwen2-yarn", "qwen3", "mistral", "ministral", "gemma2", "gemma3",
    "phi3-short", "phi3-long", "olmo2", "olmo3", "granite", "granite4", "opt", "opt-350m", "opt-unbiased", "smollm3",
    "seed_oss", "ministral3", "ernie4_5", "gemma4-dense",
]  # fmt: skip
EXPERTS = ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama4", "gemma4-moe"]
FAST = ["llama-3.1", "qwen3_moe"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def open_llm(path: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 56, "num_gpu_blocks_override": 200}
    return LLM(model=str(path), device="cpu", dtype="float32", skip_tokenizer_init=True, **(sizes | options))


def generate(llm: LLM, prompts: list[list[int]], lora: Any = None) -> list[list[int]]:
    """Continue prompts greedily, all at once."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora)
    return [output.outputs[0].token_ids for output in outputs]


def check_family(name: str, folder: Path, count: int, ranks: int = 1) -> None:
    """Compare a model with an adapter, on so many ranks, with one that it is merged into, on one."""
    model, prompts = save_model(name, folder / "base"), make_prompts(count)
    adapter = write_adapter(folder / "adapter", find_targets(model), seed=7, use_rslora=True)
    merge(model, adapter)
    model.save_pretrained(folder / "merged")
    with open_llm(folder / "base", enable_lora=True, tensor_parallel_size=ranks, cpu_threads=ranks) as llm:
        plain = generate(llm, prompts)
        found = generate(llm, prompts, LoRARequest("one", 1, str(adapter)))
        assert generate(llm, prompts) == plain
    with open_llm(folder / "merged") as llm:
        assert found == generate(llm, prompts)
    assert sum(one != other for one, other in zip(found, plain, strict=True)) > count // 2, "the adapter does little"


@pytest.mark.parametrize("name", FAST)
def test_an_adapter_is_as_if_it_were_merged(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path, 8)


@pytest.mark.long
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_an_adapter_is_as_if_it_were_merged_in_each_family(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path, 50)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_part_of_an_adapter(ranks: int, tmp_path: Path) -> None:
    """With four, two ranks have copies of each head of keys."""
    check_family("llama-3.1", tmp_path, 8, ranks)


@pytest.mark.long
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_each_rank_has_its_part_of_an_adapter_in_each_family(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path, 50, 2)


def test_the_families_exist() -> None:
    assert {*DENSE, *EXPERTS} <= set(FAMILIES)
