# SPDX-License-Identifier: Apache-2.0
"""The model that is to be quantized: what its directory or GGUF file holds besides the matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blink.config import FrontendConfig, ModelConfig
from blink.errors import ConfigError
from blink.models.families import FAMILIES
from blink.models.rope import Rope
from blink.models.spec import ModelSpec
from blink.models.weights.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from blink.models.weights.files import resolve_model
from blink.models.weights.gguf_header import read_gguf_metadata
from blink.models.weights.source import find_format, read_spec
from blink.models.weights.text_files import TEMPLATE_FOLDER, TEXT_FILES, read_file, read_json
from blink.quantize.directory import ModelDirectory
from blink.text.assets import ModelAssets, load_assets
from blink.text.gguf_tokenizer import build_tokenizer
from blink.text.template_sources import find_gguf_templates

_WIDE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_FILE_BYTES = 128 << 20


class SourceModel:
    """A model in 16 or more bits, or in a GGUF file."""

    def __init__(self, model: str) -> None:
        """Open it.

        Raises:
            ConfigError: there is none, or it cannot be quantized.
        """
        self.path = resolve_model(model)
        self._files: dict[str, bytes] = {}
        if self.path.is_dir():
            names = [name for name in TEXT_FILES if (self.path / name).is_file()]
            names += [f"{TEMPLATE_FOLDER}/{path.name}" for path in (self.path / TEMPLATE_FOLDER).glob("*.jinja")]
            self._files = {name: read_file(self.path / name, _MAX_FILE_BYTES, root=self.path) for name in names}
        self.spec = read_spec(self.path)
        if self.spec.quantization is not None:
            raise ConfigError(
                f"{self.path} has matrices of {self.spec.quantization.title} already; take one of 16 bits."
            )
        family = FAMILIES[self.spec.architecture]
        if family.experts is not None and family.experts.are_joined:
            raise ConfigError(f"{self.path}: experts that share a tensor ({self.spec.architecture}) are not quantized.")
        if family.tensor_names:
            raise ConfigError(f"{self.path}: {family.title} is not quantized by this command; use --quantization fp8.")
        if find_format(self.path) == "gguf":
            self._config = _describe_gguf(self.path, self.spec)
            self.checkpoint: GgufCheckpoint | SafetensorsCheckpoint = GgufCheckpoint(self.path, self.spec)
        else:
            self._config = read_json(self.path / "config.json")
            if "text_config" in self._config:
                raise ConfigError(f"{self.path} has more than a text model; only those are quantized.")
            self.checkpoint = SafetensorsCheckpoint(self.path, self.spec)

    def check_weights(self) -> None:
        """Look at all weights once.

        Raises:
            ConfigError: one is not a number or infinite, at the latest in the type that read() returns.
        """
        is_gguf = isinstance(self.checkpoint, GgufCheckpoint)
        for name, stored in self.checkpoint.each():
            values = stored.to(torch.bfloat16) if is_gguf else stored
            if values.is_floating_point() and values.numel() and not torch.stack(values.aminmax()).isfinite().all():
                raise ConfigError(f"{self.path}: '{name}' holds weights that are infinite or no numbers.")

    def load_assets(self) -> ModelAssets:
        """Load the tokenizer and what goes with it."""
        return load_assets(FrontendConfig(model=ModelConfig(model=str(self.path))))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as it is to be written: in its own type, from a GGUF file in bfloat16."""
        if isinstance(self.checkpoint, SafetensorsCheckpoint):
            return self.checkpoint.read(name, _WIDE_TYPES)
        values = torch.empty(shape, dtype=torch.bfloat16)
        self.checkpoint.fill(name, values)
        return values

    def write_files(self, output: ModelDirectory, quantization: Mapping[str, Any], *, has_own_output: bool) -> None:
        """Write config.json, and the tokenizer with what belongs to it.

        has_own_output: the output layer is written too, so that it is not tied to the embeddings even if it was.
        """
        untied = {"tie_word_embeddings": False} if has_own_output and self.spec.tie_embeddings else {}
        output.write_json("config.json", {**self._config, **untied, "quantization_config": dict(quantization)})
        if self.path.is_file():
            _write_gguf_tokenizer(self.path, self.load_assets(), output)
            return
        for name, data in self._files.items():
            output.write_bytes(name, data)


def _describe_gguf(path: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model."""
    family, layer, attention = FAMILIES[spec.architecture], spec.layers[0], spec.attentions[0]
    rope = attention.rope
    # All that the values below do not say is to be as transformers' class for the family has it by itself.
    said = Rope(theta=rope.theta, rotary_dim=attention.head_dim)
    is_said = rope == said and not attention.options_beyond("qk_norm", "qkv_bias") and not layer.mlp.options_beyond()
    if not family.gguf_class or not is_said or len(spec.distinct_layers) > 1:
        raise ConfigError(f"{path}: such a model is quantized from its Hugging Face directory only, not from GGUF.")
    return {
        "architectures": [family.gguf_class],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.mlp.size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_bias": attention.qkv_bias and not family.qkv_bias,
        "torch_dtype": "bfloat16",
    }


def _write_gguf_tokenizer(path: Path, assets: ModelAssets, output: ModelDirectory) -> None:
    metadata = read_gguf_metadata(path)
    build_tokenizer(metadata).save(str(output.path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if templates := find_gguf_templates(metadata, str(path)):
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = metadata.get(
            f"tokenizer.ggml.{name.replace('unk', 'unknown').replace('pad_token', 'padding_token')}_id"
        )
        if token is not None:
            config[name] = assets.tokenizer.token_name(token)
    output.write_json("tokenizer_config.json", config)
    output.write_json("generation_config.json", {"eos_token_id": list(assets.eos_token_ids)})
