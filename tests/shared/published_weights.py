# SPDX-License-Identifier: Apache-2.0
"""Random weights for small models of published families, in the files that their makers publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mxfp4_checkpoints import quantize_model
from quantized_checkpoints import write_checkpoints

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def make_weights(config: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """Return the files of a model's weights by name. folder: an empty one, for what is written on the way."""
    values = {name: value for name, value in config.items() if name not in ("rope_theta", "quantization_config")}
    if config.get("quantization_config", {}).get("quant_method") == "awq":
        folder, _ = write_checkpoints(folder, "awq-64", **values)
    else:
        model = _make_model(values)
        model.save_pretrained(folder, max_shard_size="60KB")
        if config["model_type"] == "gpt_oss":
            quantize_model(model, folder)
    return {path.name: path.read_bytes() for path in folder.glob("model*")}


def _make_model(values: dict[str, Any]) -> Any:
    if values["model_type"] == "gemma3":
        parts = {"text_config": values["text_config"], "vision_config": _VISION, "mm_tokens_per_image": 4}
        return AutoModelForImageTextToText.from_config(AutoConfig.for_model("gemma3", **parts))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
