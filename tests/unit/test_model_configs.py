# SPDX-License-Identifier: Apache-2.0
"""The benchmark configurations describe the public models: sizes as published, shapes as transformers builds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import blink.models
from blink.models.weights.source import read_spec

CONFIGS = Path(blink.models.__file__).parent / "configs"
# Parameters, as the models' pages on the Hugging Face hub state them.
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "phi-4": 14_659_507_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}


def test_every_configuration_has_its_published_size() -> None:
    assert {path.name: read_spec(path).num_parameters for path in CONFIGS.iterdir()} == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_the_same_model(name: str) -> None:
    spec = read_spec(CONFIGS / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / name))
    assert model.num_parameters() == spec.num_parameters
    rates = model.model.rotary_emb
    assert tuple(model.lm_head.weight.shape) == (spec.vocab_size, spec.hidden_size)
    assert rates.inv_freq.shape == (spec.layers[0].mixer.rope.rotary_dim // 2,)
