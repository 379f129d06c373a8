# SPDX-License-Identifier: Apache-2.0
"""The benchmark configurations describe the public models: sizes as published, shapes as transformers builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import blink.models
from blink.errors import ConfigError
from blink.models.weights.overrides import override
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
    assert rates.inv_freq.shape == (spec.attentions[0].rope.rotary_dim // 2,)


def with_overrides(changes: dict[str, Any], **values: Any) -> dict[str, Any]:
    return override({"max_position_embeddings": 4096, "rope_theta": 1e4, **values}, changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("values", "changes", "found"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}, {"a": {"b": 3, "c": 2}, "d": 4}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({}, {"rope_theta": 5.0}, {"rope_theta": 5.0}),
        (
            {"rope_parameters": {"rope_theta": 1.0}},
            {"rope_theta": 5.0},
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 5.0}},
        ),
        ({}, {"rope_scaling": YARN}, {"rope_parameters": YARN, "max_position_embeddings": 8192}),
        (
            {"rope_parameters": {"rope_theta": 7.0, "factor": 2.0}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {
                "rope_parameters": {"rope_theta": 7.0, "type": "linear", "factor": 2.0},
                "max_position_embeddings": 8192,
            },
        ),
        (
            {"rope_scaling": {"factor": 9.0}},
            {"rope_parameters": YARN, "max_position_embeddings": 5000},
            {"rope_parameters": YARN, "max_position_embeddings": 5000},
        ),
        ({}, {"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_type": "default"}}),
    ],
)
def test_overrides_replace_parts_of_a_config(
    values: dict[str, Any], changes: dict[str, Any], found: dict[str, Any]
) -> None:
    result = with_overrides(changes, **values)
    kept = {"max_position_embeddings": 4096, "rope_theta": 1e4}
    assert result == {**kept, **found}


@pytest.mark.parametrize("changes", [{"rope_scaling": "yarn"}, {"rope_parameters": [1]}, {"rope_scaling": {"type": 3}}])
def test_malformed_overrides_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--hf-overrides"):
        with_overrides(changes)
