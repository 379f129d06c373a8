# SPDX-License-Identifier: Apache-2.0
"""Steps of one or two rows of models with recurrent layers and shared experts: GEMVs, against the general kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blink.config import ModelConfig
from blink.models.weights.loader import load_model
from blink.plan.execution_plan import NormStyle
from model_driver import compute_decoded_logits
from model_families import FAMILIES, SMALL
from step_plans import plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Sizes that the kernels for few rows take.
WIDE: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {**SMALL, **FAMILIES["qwen3_5"], **WIDE},
    "Qwen3_5MoeForCausalLM": {**SMALL, **FAMILIES["qwen3_5_moe"], **WIDE, **MIXTURE},
    "Qwen3NextForCausalLM": {**SMALL, **FAMILIES["qwen3_next"], **WIDE, **MIXTURE},
}


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_gemvs_give_the_logits_of_the_general_kernels(name: str, rows: int, quantization: str, tmp_path: Path) -> None:
    values = {**MODELS[name], "architectures": [name]}
    if quantization == "fp8" and "num_experts" in values:  # a choice between experts turns with a rounding
        values["num_experts_per_tok"] = values["num_experts"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig(model=str(tmp_path), load_format="dummy", quantization=quantization)
    decoder = load_model(config, torch.device("cuda"), torch.bfloat16)
    has_gemvs = (
        rows == 1 or quantization == "auto" or name == "Qwen3_5ForCausalLM"
    )  # for two, experts in FP8 have others
    assert (plan_of(decoder, rows).norms is NormStyle.READER) == has_gemvs
    found = compute_decoded_logits(decoder, rows)
    expected = compute_decoded_logits(decoder, rows, decoding=False)
    assert torch.isfinite(found).all() and expected.std() > 0.01
    assert (found - expected).norm() / expected.norm() < 3e-2
