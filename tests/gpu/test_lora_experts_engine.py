# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts and of latent attention on the GPU engine: as if merged, and many in a batch as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_lora_engine import open_llm

from blink import LoRARequest
from lora_adapters import find_targets, merge, write_adapter
from lora_calls import generate, make_prompts
from lora_experts import LLAMA, merge_experts, write_by_expert, write_fused
from model_families import save_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


def check_merged(folder: Path, adapter: Path) -> None:
    """Compare the model in base/ with an adapter and the one in merged/."""
    prompts = make_prompts(16)
    with open_llm(folder / "base", enable_lora=True) as llm:
        plain = generate(llm, prompts)
        found = generate(llm, prompts, LoRARequest("one", 1, str(adapter)))
        assert generate(llm, prompts) == plain
    with open_llm(folder / "merged") as llm:
        assert found == generate(llm, prompts)
    assert found != plain


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_an_adapter_of_experts_is_as_if_it_were_merged(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path / "base")
    adapter = write_fused(tmp_path / "adapter", model, seed=7, use_rslora=True)
    merge_experts(model, adapter)
    model.save_pretrained(tmp_path / "merged")
    check_merged(tmp_path, adapter)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_an_adapter_of_latent_attention_is_as_if_it_were_merged(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path / "base", qk_rope_head_dim=16, head_dim=16)  # kernels take 16 rows at least
    targets = find_targets(model, ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    adapter = write_adapter(tmp_path / "adapter", targets, seed=7, use_rslora=True)
    merge(model, adapter)
    model.save_pretrained(tmp_path / "merged")
    check_merged(tmp_path, adapter)


def test_eight_adapters_and_none_in_one_batch_give_the_cpus_tokens(tmp_path: Path) -> None:
    model, prompts = save_model("qwen3_moe", tmp_path / "base"), make_prompts(9)
    paths = [write_fused(tmp_path / f"{seed}", model, seed=seed, rank=1 + seed) for seed in range(4)]
    dense = find_targets(model)
    paths += [
        write_by_expert(tmp_path / f"{seed}", model, block="mlp", names=LLAMA, seed=seed, rank=seed, dense=dense)
        for seed in range(4, 8)
    ]
    loras = [None, *(LoRARequest(f"{index}", index + 1, str(path)) for index, path in enumerate(paths))]
    with open_llm(tmp_path / "base", enable_lora=True, max_loras=8) as llm:
        found = generate(llm, prompts, loras)
    with open_llm(tmp_path / "base", enable_lora=True, max_loras=2, max_cpu_loras=8) as llm:
        assert generate(llm, prompts, loras) == found, "adapters that take turns give other tokens"
    with open_llm(tmp_path / "base", enable_lora=True, max_loras=8, device="cpu") as llm:
        assert generate(llm, prompts, loras) == found
