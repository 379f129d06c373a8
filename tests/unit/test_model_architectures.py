# SPDX-License-Identifier: Apache-2.0
"""Small random models of every architecture against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blink.config import ModelConfig
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from model_driver import Driver

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biased-scaled": {"model_type": "llama", "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-biased": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True, **EXPERTS},
    "qwen3-moe-plain-weights": {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": False, **EXPERTS},
    "phi3": {"model_type": "phi3"},
    "phi3-partial-rotary": {
        "model_type": "phi3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
PROMPTS = ([5, 17, 99, 3, 42, 8, 77], [1, 2], list(range(20, 60)))


@pytest.fixture(params=CONFIGS)
def saved_model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A directory made by save_pretrained, in several shards, and the model in it."""
    torch.manual_seed(30)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL, **CONFIGS[request.param])).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms start at 1 and biases at 0, which would hide mistakes
                weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path, model


def test_logits_equal_those_of_transformers(saved_model: tuple[Path, Any]) -> None:
    path, model = saved_model
    decoder = load_model(ModelConfig(model=str(path)), torch.device("cpu"), torch.float32)
    driver = Driver(decoder, block_size=8, max_len=64)
    for prompt in PROMPTS:
        driver.add(prompt, 1)
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    torch.testing.assert_close(driver.compute_logits(), expected, rtol=1e-3, atol=1e-3)


def test_greedy_tokens_of_chunked_and_mixed_steps_equal_those_of_transformers(saved_model: tuple[Path, Any]) -> None:
    path, model = saved_model
    decoder = load_model(ModelConfig(model=str(path)), torch.device("cpu"), torch.float32)
    driver = Driver(decoder, block_size=8, max_len=64)
    for prompt in PROMPTS:
        driver.add(prompt, 10)
        driver.step(max_chunk=6)
    with torch.inference_mode():
        expected = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=10,
                do_sample=False,
                eos_token_id=None,
            )[0].tolist()
            for prompt in PROMPTS
        ]
    assert driver.run(max_chunk=6) == expected


def test_the_number_of_parameters_equals_that_of_transformers(saved_model: tuple[Path, Any]) -> None:
    path, model = saved_model
    assert read_spec(path).num_parameters == model.num_parameters()
