# SPDX-License-Identifier: Apache-2.0
"""Build a decoder from a checkpoint, one tensor at a time, so that at most one exists twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding, Weight, matrix_of, plain
from blink.formats.fp8 import FP8
from blink.formats.layouts import Layout
from blink.kernels.linear import pack_weight
from blink.kernels.operands import UNSCALED, AttentionOptions, HeadNorm, KvScales, LayerNorm, Norm
from blink.models.decoder import Decoder
from blink.models.families import FAMILIES
from blink.models.families.base import ExpertNames
from blink.models.layer_weights import DenseWeights, LayerWeights, MoeWeights, SharedExpert
from blink.models.layers import Attention, LayerSpec
from blink.models.mlps import DenseMlp, MoeMlp
from blink.models.pooling import Pooling
from blink.models.spec import ModelSpec
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.expert_loader import load_experts
from blink.models.weights.latent_loader import LatentLoader
from blink.models.weights.layer_end_loader import add_mlp_beside, load_end, load_layer_inputs
from blink.models.weights.recurrent_loader import RecurrentLoader
from blink.models.weights.target import WeightTarget
from blink.models.weights.tensor_loader import TensorLoader

# Where checkpoints keep a layer's norms: before attention, behind it, before the MLP, behind it.
_NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
Place = Callable[[str, Any], Any]
_LAST_NORM = "post_attention_layernorm"  # of a layer where norms replace the residual


class DecoderLoader:
    """Reads the weights that a spec describes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        target: WeightTarget,
        kv_scales: Sequence[KvScales] = (),
        table_device: torch.device | None = None,
        place: Place | None = None,
    ) -> None:
        """Read from a checkpoint; kv_scales: of each layer's KV cache, which then is FP8.

        table_device: where the table of per-layer embeddings is to lie; None: with the other weights. place: takes
        each part's name, as the decoder has it, and what was read; returns what the decoder is to have.
        """
        self._place: Place = place or (lambda name, part: part)  # noqa: ARG005
        self._checkpoint = checkpoint
        self._spec = spec
        self._target = target
        self._kv_scales = kv_scales
        self._table_device = table_device
        self._family = FAMILIES[spec.architecture]
        self._tensors = TensorLoader(checkpoint, target, shifted_norms=self._family.shifted_norms)
        is_grouped = self._family.has_grouped_projections
        sizes = spec.hidden_size, spec.rms_norm_eps
        self._recurrent = RecurrentLoader(checkpoint, self._tensors, target, *sizes, is_grouped)

    @torch.inference_mode()
    def load(self) -> Decoder:
        """Read all weights, in the order in which a step uses them."""
        spec, place = self._spec, self._place
        embedding, head = self._load_ends()
        embedding = place("embedding", embedding)
        positions = place("positions", self._load_positions())
        layers = [place(f"layers.{index}", self.load_layer(index)) for index in range(spec.num_layers)]
        norm = place("norm", self.load_norm(_find_end_norm(spec)))
        lm_head = place("lm_head", self._load_head(embedding) if head is None else head)
        inputs = place("inputs", load_layer_inputs(self._tensors, spec, self._table_device))
        kv_dtype = FP8 if self._kv_scales else self._target.kv_dtype
        classifier = None if spec.pooling is None else self._load_classifier(spec.pooling, embedding)
        classifier = place("classifier", classifier)
        return Decoder(spec, embedding, layers, norm, lm_head, kv_dtype, positions, inputs, classifier)

    def _load_ends(self) -> tuple[Tensor | QuantizedEmbedding, Weight | None]:
        """Read the embedding, and the output layer where both are made of other matrices; None: it comes last."""
        embedding = self._load_vocabulary("model.embed_tokens.weight")
        return self._multiply_projections(plain(embedding)) if self._spec.embedding_size else (embedding, None)

    def _load_head(self, embedding: Tensor | QuantizedEmbedding) -> Weight:
        """Read the output layer; the embedding where both are one, or nothing reads it."""
        spec = self._spec
        if spec.tie_embeddings or spec.pooling is not None:
            return _pack(embedding)
        return self._tensors.load_matrix({"lm_head": len(spec.vocab_part)}, spec.hidden_size)

    def _load_classifier(self, pooling: Pooling, embedding: Tensor | QuantizedEmbedding) -> Tensor | None:
        """Read what makes a score of a pooled state, float32 [1, hidden]; None: the model embeds."""
        if not pooling.scores:
            return None
        if pooling.score_tokens is None:
            return self._tensors.read("score.weight", 1, self._spec.hidden_size).float()
        shape = len(self._spec.vocab_part), self._spec.hidden_size
        head = plain(embedding) if self._spec.tie_embeddings else self._tensors.read("lm_head.weight", *shape)
        first, second = head[[*pooling.score_tokens]].float()
        return (second - first)[None]

    def _load_vocabulary(self, name: str) -> Tensor | QuantizedEmbedding:
        """Read a row for each token."""
        shape = (len(self._spec.vocab_part), self._spec.embedding_size or self._spec.hidden_size)
        self._checkpoint.check(name, shape)
        quantized = self._target.read_quantized(self._checkpoint, name)
        return self._tensors.read(name, *shape) if quantized is None else quantized

    def _multiply_projections(self, embedding: Tensor) -> tuple[Tensor, Weight]:
        """Return embedding and output layer of the hidden size, from narrower ones and the projections beside them."""
        hidden, size = self._spec.hidden_size, self._spec.embedding_size
        into = self._tensors.read("model.project_in.weight", hidden, size)
        back = self._tensors.read("model.project_out.weight", size, hidden)
        head = embedding if self._spec.tie_embeddings else self._tensors.read("lm_head.weight", *embedding.shape)
        return embedding @ into.T, pack_weight(head @ back)

    def _load_positions(self) -> Tensor | None:
        """Read what is added to the embeddings, from the row of position 0 on."""
        table = self._spec.positions
        if table is None:
            return None
        return self._tensors.read("model.embed_positions.weight", table.rows, self._spec.hidden_size)[table.offset :]

    def load_layer(self, index: int) -> LayerWeights:
        """Read the layer of an index."""
        prefix, spec = f"model.layers.{index}", self._spec.layers[index]
        norms = [None if name is None else self.load_norm(name) for name in _find_norms(spec, index)]
        mixer = self._load_mixer(index, prefix)
        return LayerWeights(
            attention_norm=norms[0],
            **mixer,
            mlp_norm=norms[2],
            mlp=self._load_mlp(spec.mlp, prefix),
            attention_end_norm=norms[1],
            mlp_end_norm=norms[3],
            end=load_end(self._tensors, spec, self._spec.hidden_size, prefix) if spec.has_scale else None,
        )

    def _load_mixer(self, index: int, prefix: str) -> dict[str, Any]:
        """Read what mixes tokens, as fields of LayerWeights."""
        mixer = self._spec.layers[index].mixer
        if mixer.attention is not None:
            kv_scales = self._kv_scales[index] if self._kv_scales else UNSCALED
            latents = LatentLoader(self._tensors, self._spec.hidden_size)
            load = self._load_attention if mixer.attention.latent is None else latents.load
            return load(mixer.attention, f"{prefix}.self_attn", kv_scales)
        assert mixer.recurrence is not None
        return self._recurrent.load(mixer.recurrence, f"{prefix}.{self._family.recurrent_block}")

    def _load_attention(self, mixer: Attention, prefix: str, kv_scales: KvScales) -> dict[str, Any]:
        hidden = self._spec.hidden_size
        parts = list_projections(mixer)
        if self._family.is_qkv_fused:
            parts = {"qkv_proj": sum(parts.values())}
        qkv = {f"{prefix}.{name}": rows for name, rows in parts.items()}
        output = {f"{prefix}.o_proj": hidden}
        head_dims, wide = (mixer.head_dim, mixer.head_dim), (mixer.q_size, mixer.kv_size)
        return {
            "qkv": self._tensors.load_matrix(qkv, hidden, order_rows(mixer, separates_pairs=self._separates_pairs)),
            "qkv_bias": self._tensors.stack("bias", qkv) if mixer.qkv_bias else None,
            "output": self._tensors.load_matrix(output, mixer.q_size),
            "output_bias": self._tensors.stack("bias", output) if mixer.output_bias else None,
            "head_norm": self._load_head_norm(prefix, head_dims, mixer) if "head" in mixer.qk_norm.split("_") else None,
            "wide_norm": self._load_head_norm(prefix, wide, mixer) if mixer.qk_norm == "all_heads" else None,
            "attention": AttentionOptions(
                mixer.scale,
                mixer.softcap,
                mixer.window,
                self._tensors.read(f"{prefix}.sinks", mixer.heads, dtype=torch.float32) if mixer.sinks else None,
                kv_scales,
                mixer.chunk,
            ),
        }

    @property
    def _separates_pairs(self) -> bool:
        return self._family.rotates_pairs and self._checkpoint.keeps_groups

    def _load_head_norm(self, prefix: str, sizes: tuple[int, int], mixer: Attention) -> HeadNorm:
        if mixer.qk_norm == "plain_head":
            query, key = (self._target.allocate(size).fill_(1) for size in sizes)
            return HeadNorm(query, key, self._spec.rms_norm_eps)
        names = ("q_norm", "k_norm" if mixer.kv_source is None else "q_norm")  # where there are no keys, any
        query, key = (
            self._tensors.read_norm(f"{prefix}.{name}", size) for name, size in zip(names, sizes, strict=True)
        )
        return HeadNorm(query, key, self._spec.rms_norm_eps)

    def _load_experts(self, mlp: MoeMlp, block: str, names: ExpertNames) -> MoeWeights:
        experts = load_experts(self._checkpoint, mlp, block, self._spec.hidden_size, names, self._target)
        return replace(experts, first=mlp.held * self._spec.shard.rank)

    def _load_mlp(self, mlp: DenseMlp | MoeMlp, layer: str) -> DenseWeights | MoeWeights:
        hidden, names = self._spec.hidden_size, self._family.experts
        if mlp.mixture is not None:
            assert names is not None
            if mlp.mixture.is_beside:
                assert mlp.dense is not None
                experts = self._load_experts(mlp.mixture, layer, names)
                return add_mlp_beside(self._tensors, experts, self._load_dense(mlp.dense, f"{layer}.mlp"), layer)
            block = f"{layer}.{names.block}"
            experts = self._load_experts(mlp.mixture, block, names)
            if mlp.dense is None:
                return experts
            shared = self._load_dense(mlp.dense, f"{block}.{names.shared}" if names.shared else f"{layer}.mlp")
            gate = None
            if mlp.mixture.shared_gate:
                gate = self._tensors.read(f"{block}.{names.shared}_gate.weight", 1, hidden)[0]
            return replace(experts, shared=SharedExpert(shared, gate))
        assert mlp.dense is not None
        return self._load_dense(mlp.dense, f"{layer}.mlp")

    def _load_dense(self, mlp: DenseMlp, prefix: str) -> DenseWeights:
        hidden, size = self._spec.hidden_size, mlp.size
        parts = {"gate_proj": size, "up_proj": size} if mlp.inner_size > size else {"up_proj": size}
        if self._family.is_gate_up_fused:
            parts = {"gate_up_proj": mlp.inner_size}
        inner = {f"{prefix}.{name}": rows for name, rows in parts.items()}
        down = {f"{prefix}.down_proj": hidden}
        return DenseWeights(
            gate_up=self._tensors.load_matrix(inner, hidden),
            down=self._tensors.load_matrix(down, size),
            activation=mlp.activation,
            biases=(self._tensors.stack("bias", inner), self._tensors.stack("bias", down))
            if mlp.biases
            else (None, None),
        )

    def load_norm(self, name: str) -> Norm:
        """Read a norm of the residual."""
        hidden, layer = self._spec.hidden_size, self._spec.layers[0]
        if not layer.norm_biases:
            return self._tensors.read_norm(name, hidden)
        weight, bias = (self._tensors.read(f"{name}.{part}", hidden) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, layer.norms == "replacing")


def _find_norms(layer: LayerSpec, index: int) -> list[str | None]:
    """Return the names of a layer's norms: before attention, behind it, before the MLP, behind it.

    One that replaces the residual belongs to who computed that: the first layer reads embeddings as they are.
    """
    prefix = f"model.layers.{index}"
    if layer.norms == "replacing":
        before = f"model.layers.{index - 1}.{_LAST_NORM}" if index else None
        return [before, None, f"{prefix}.input_layernorm", None]
    return [None if name is None else f"{prefix}.{name}" for name in _NORMS[layer.norms]]


def _find_end_norm(spec: ModelSpec) -> str:
    """Return the name of the norm behind the last layer."""
    if spec.layers[-1].norms == "replacing":
        return f"model.layers.{spec.num_layers - 1}.{_LAST_NORM}"
    return "model.norm"


def list_projections(mixer: Attention) -> dict[str, int]:
    """Return the projections before attention, and the rows of each."""
    queries = {"q_proj": (1 + mixer.output_gate) * mixer.q_size}
    if mixer.kv_source is not None:
        return queries
    keys = {"k_proj": mixer.kv_size}
    return {**queries, **keys} if mixer.keys_as_values else {**queries, **keys, "v_proj": mixer.kv_size}


def order_rows(mixer: Attention, *, separates_pairs: bool) -> list[Tensor] | None:
    """Return which rows of each projection to take, so that each pair to rotate lies half a head apart."""
    if mixer.keys_as_values and mixer.kv_source is None:
        return [torch.arange(mixer.q_size), torch.arange(mixer.kv_size).repeat(2)]
    if not separates_pairs:
        return None
    sizes = torch.arange(mixer.q_size), torch.arange(mixer.kv_size)
    rotated = [rows.view(-1, mixer.head_dim // 2, 2).transpose(1, 2).flatten() for rows in sizes]
    return [*rotated, sizes[1]]


def _pack(weight: Weight) -> Weight:
    return pack_weight(plain(weight)) if matrix_of(weight).layout is Layout.ROWS else weight
