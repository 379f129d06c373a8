# SPDX-License-Identifier: Apache-2.0
"""What /tokenizer_info tells: the tokenizer's configuration, as its file has it, with the chat template in use."""

from __future__ import annotations

from typing import Any

from blink.config import ModelConfig
from blink.models.weights.files import resolve_model
from blink.models.weights.text_files import read_json
from blink.text.assets import ModelAssets

_UNNAMED = "PreTrainedTokenizerFast"  # how transformers loads a tokenizer.json that names no class


def describe_tokenizer(config: ModelConfig, assets: ModelAssets) -> dict[str, Any]:
    """Return the members of tokenizer_config.json; of a GGUF file, its special tokens.

    Raises:
        ConfigError: the file cannot be read any more.
    """
    path = resolve_model(config.tokenizer or config.model) / "tokenizer_config.json"
    told = read_json(path) if path.is_file() else {}
    chosen = {"tokenizer_class": told.get("tokenizer_class") or _UNNAMED, "chat_template": assets.template_source}
    return {**assets.special_tokens, **told, **chosen}
