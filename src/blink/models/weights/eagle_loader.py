# SPDX-License-Identifier: Apache-2.0
"""Load an EAGLE-3 draft head, as SafeAILab's EAGLE and speculators store it: config.json and safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.kernels.rotary import make_rotary_table
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.models.layer_weights import DenseWeights
from blink.models.layers import Attention
from blink.models.weights.checkpoint import SafetensorsCheckpoint
from blink.models.weights.eagle_config import read_head_attention, read_head_config
from blink.models.weights.target import WeightTarget
from blink.models.weights.tensor_loader import TensorLoader

_LAYERS = ("midlayer", "layers.0")  # what EAGLE and speculators call the layer
_INDICES = (torch.int64, torch.int32)


@torch.inference_mode()
def load_eagle(folder: str, model: Decoder) -> EagleHead:
    """Load the head in a folder that drafts for a model, in the model's type and for its longest text.

    Raises:
        ConfigError: it is missing or malformed, or does not belong to the model; the message names the tensor.
    """
    return _HeadLoader(folder, model).load()


class _HeadLoader:
    """Reads a folder's head."""

    def __init__(self, folder: str, model: Decoder) -> None:
        self._model = model
        self._config = read_head_config(folder)
        self._checkpoint = SafetensorsCheckpoint(Path(folder).expanduser())
        target = WeightTarget(model.device, model.dtype, int)
        self._tensors = TensorLoader(self._checkpoint, target, shifted_norms=False)
        self._hidden = self._config.integer("hidden_size")
        found = (name for name in _LAYERS if self._checkpoint.has(f"{name}.hidden_norm.weight"))
        self._layer = next(found, _LAYERS[0])

    def load(self) -> EagleHead:
        config, spec, hidden = self._config, self._model.spec, self._hidden
        attention = read_head_attention(config, spec.max_model_len)
        layers = self._read_layers()
        size, draft_size = config.integer("intermediate_size"), config.integer("draft_vocab_size", spec.vocab_size)
        inner = {f"{self._layer}.mlp.{name}": size for name in ("gate_proj", "up_proj")}
        rope = attention.rope
        return EagleHead(
            attention=attention,
            eps=config.number("rms_norm_eps"),
            layers=layers,
            residual_is_normed=config.flag("norm_before_residual"),
            embedding=self._load_embedding(),
            rotary_table=make_rotary_table(rope.frequencies(), spec.max_model_len, self._model.device, rope.magnitude),
            fusion=self._tensors.load_matrix({"fc": hidden}, len(layers) * spec.hidden_size),
            embedding_norm=self._read_norm(f"{self._layer}.input_layernorm"),
            hidden_norm=self._read_norm(f"{self._layer}.hidden_norm"),
            qkv=self._tensors.load_matrix(self._name_projections(attention), 2 * hidden),
            output=self._tensors.load_matrix({f"{self._layer}.self_attn.o_proj": hidden}, attention.out_size),
            mlp_norm=self._read_norm(f"{self._layer}.post_attention_layernorm"),
            mlp=DenseWeights(
                gate_up=self._tensors.load_matrix(inner, hidden),
                down=self._tensors.load_matrix({f"{self._layer}.mlp.down_proj": hidden}, size),
            ),
            norm=self._read_norm("norm"),
            lm_head=self._tensors.load_matrix({"lm_head": draft_size}, hidden),
            tokens=self._read_tokens(draft_size),
        )

    def _read_layers(self) -> tuple[int, ...]:
        """Return which layers' residuals the head reads: those of its description, or an early, a middle, a late."""
        config, count = self._config, self._model.spec.num_layers
        layers = tuple(config.integers("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3]))
        if not layers or not all(0 <= index < count for index in layers):
            raise ConfigError(
                f"{config.place}: eagle_aux_hidden_state_layer_ids {[*layers]} are no layers of the model, which has "
                f"{count}; the head belongs to another model."
            )
        return layers

    def _load_embedding(self) -> Tensor | None:
        name, spec = "embed_tokens.weight", self._model.spec
        if not self._checkpoint.has(name) and (spec.embedding_size or spec.hidden_size) == self._hidden:
            return None
        return self._tensors.read(name, spec.vocab_size, self._hidden)

    def _name_projections(self, attention: Attention) -> dict[str, int]:
        rows = {"q_proj": attention.q_size, "k_proj": attention.kv_size, "v_proj": attention.kv_size}
        return {f"{self._layer}.self_attn.{name}": count for name, count in rows.items()}

    def _read_norm(self, name: str) -> Tensor:
        return self._tensors.read_norm(name, self._hidden)

    def _read_tokens(self, draft_size: int) -> Tensor:
        """Return which of the model's tokens each of the head's is: i + d2t[i]."""
        vocab_size, own = self._model.spec.vocab_size, torch.arange(draft_size)
        if self._checkpoint.has("d2t") or draft_size != vocab_size:
            self._checkpoint.check("d2t", (draft_size,))
            own += self._checkpoint.read("d2t", _INDICES)
        if not bool(((own >= 0) & (own < vocab_size)).all()):
            raise ConfigError(f"{self._checkpoint.place}: 'd2t' names tokens beyond the model's {vocab_size}.")
        return own.to(self._model.device)
