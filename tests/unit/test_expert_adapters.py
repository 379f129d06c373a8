# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts and of latent attention on the CPU engine: as if merged, in both forms of PEFT's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora_models import generate, open_llm

from blink import LoRARequest
from blink.adapters.modules import find_weights, list_modules
from blink.config import ModelConfig
from blink.errors import BadRequestError
from blink.models.weights.loader import load_model
from lora_adapters import find_targets, merge, write_adapter
from lora_calls import make_prompts
from lora_experts import DOWN, GATE_UP, LLAMA, OLD, merge_experts, write_by_expert, write_fused
from model_families import save_model

FORMS: dict[str, tuple[str, Callable[..., Path], dict[str, Any]]] = {
    "qwen3_moe by expert": ("qwen3_moe", write_by_expert, {"block": "mlp", "names": LLAMA}),
    "mixtral by expert": ("mixtral", write_by_expert, {"block": "block_sparse_moe", "names": ("w1", "w3", "w2")}),
    "glm4_moe by expert": ("glm4_moe", write_by_expert, {"block": "mlp", "names": LLAMA}),
    "qwen3_moe fused": ("qwen3_moe", write_fused, {}),
    "qwen3_moe downs fused": ("qwen3_moe", write_fused, {"only": DOWN}),
    "mixtral gates and ups fused": ("mixtral", write_fused, {"only": GATE_UP}),
    "glm4_moe fused by PEFT 0.18": ("glm4_moe", write_fused, {"version": OLD}),
    "gpt_oss fused": ("gpt_oss", write_fused, {}),
    "deepseek_v3 fused": ("deepseek_v3", write_fused, {}),
    "gemma4-moe gates and ups fused": (
        "gemma4-moe",
        write_fused,
        {"only": GATE_UP, "target_parameters": ["experts.gate_up_proj"]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_experts_is_as_if_it_were_merged(form: str, tmp_path: Path) -> None:
    name, write, options = FORMS[form]
    model, prompts = save_model(name, tmp_path / "base"), make_prompts(8)
    adapter = write(tmp_path / "adapter", model, seed=7, use_rslora=True, **options)
    merge_experts(model, adapter)
    model.save_pretrained(tmp_path / "merged")
    with open_llm(tmp_path / "base", enable_lora=True) as llm:
        plain = generate(llm, prompts)
        found = generate(llm, prompts, LoRARequest("one", 1, str(adapter)))
    with open_llm(tmp_path / "merged") as llm:
        assert found == generate(llm, prompts)
    assert sum(one != other for one, other in zip(found, plain, strict=True)) > 2, "the adapter does little"


def test_matrices_that_hold_a_factor_of_their_expert_are_refused_by_name(tmp_path: Path) -> None:
    model = save_model("gemma4-moe", tmp_path / "base")
    adapter = write_fused(tmp_path / "one", model, seed=1, only=DOWN, target_parameters=["experts.down_proj"])
    reason = r"layers.0.experts.lora_[AB].weight' belongs to a module that takes no adapter: this model's factor"
    with open_llm(tmp_path / "base", enable_lora=True) as llm, pytest.raises(BadRequestError, match=reason):
        generate(llm, make_prompts(1), LoRARequest("one", 1, str(adapter)))


def test_eight_adapters_of_experts_and_none_in_one_batch_are_each_as_alone(tmp_path: Path) -> None:
    model, prompts = save_model("qwen3_moe", tmp_path / "base"), make_prompts(9)
    paths = [write_fused(tmp_path / f"{seed}", model, seed=seed, rank=1 + seed) for seed in range(4)]
    paths += [
        write_by_expert(
            tmp_path / f"{seed}", model, block="mlp", names=LLAMA, seed=seed, dense=find_targets(model), rank=seed
        )
        for seed in range(4, 8)
    ]
    loras = [None, *(LoRARequest(f"{index}", index + 1, str(path)) for index, path in enumerate(paths))]
    with open_llm(tmp_path / "base", enable_lora=True, max_loras=8, max_num_seqs=16) as llm:
        alone = [generate(llm, [prompt], lora)[0] for prompt, lora in zip(prompts, loras, strict=True)]
        llm.reset_prefix_cache()
        assert generate(llm, prompts, loras) == alone
        assert len({tuple(generate(llm, prompts[:1], lora)[0]) for lora in loras}) > 5


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "glm4_moe_lite"])
def test_an_adapter_of_latent_attention_is_as_if_it_were_merged(name: str, tmp_path: Path) -> None:
    model, prompts = save_model(name, tmp_path / "base"), make_prompts(8)
    targets = find_targets(model, ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    assert len(targets) >= 3 * len(model.model.layers)
    adapter = write_adapter(tmp_path / "adapter", targets, seed=7, use_rslora=True)
    merge(model, adapter)
    model.save_pretrained(tmp_path / "merged")
    with open_llm(tmp_path / "base", enable_lora=True) as llm:
        plain = generate(llm, prompts)
        found = generate(llm, prompts, LoRARequest("one", 1, str(adapter)))
        refused = write_adapter(tmp_path / "refused", find_targets(model, ("kv_b_proj",)), seed=1)
        with pytest.raises(BadRequestError, match=r"kv_b_proj.lora_[AB].weight' belongs to a module that takes no"):
            generate(llm, prompts, LoRARequest("two", 2, str(refused)))
    with open_llm(tmp_path / "merged") as llm:
        assert found == generate(llm, prompts)
    assert sum(one != other for one, other in zip(found, plain, strict=True)) > 2, "the adapter does little"


def test_a_gpu_takes_what_the_cpu_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("deepseek_v3", tmp_path)
    model = load_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"), torch.float32)
    on_cpu = {name: module.refusal for name, module in list_modules(model).items()}
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    assert {name: module.refusal for name, module in list_modules(model).items()} == on_cpu
    assert [name for name, refusal in on_cpu.items() if refusal] == [
        f"layers.{index}.self_attn.kv_b_proj" for index in range(len(model.layers))
    ]
    assert any(parts.experts for parts in find_weights(model).values())
