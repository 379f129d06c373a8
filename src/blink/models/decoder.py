# SPDX-License-Identifier: Apache-2.0
"""The one decoder definition: attention with a dense or mixture-of-experts MLP, over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding, Weight, plain
from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.batch import Batch, Header
from blink.kernels.layer_cache import KvCache, LayerCache
from blink.kernels.linear import gated_linear, linear
from blink.kernels.moe import moe
from blink.kernels.rms_norm import last_token_norm, rms_norm, rms_norm_columns
from blink.kernels.rotary import make_rotary_table, rotate_and_store
from blink.kernels.sampling import sample
from blink.kernels.scoring import score_prompts
from blink.models.layer_weights import Attend, DenseWeights, LayerWeights, MoeWeights, count_bytes, list_weights
from blink.models.layers import Activation, LayerSpec
from blink.models.rope import Rope
from blink.models.spec import ModelSpec

if TYPE_CHECKING:
    from blink.models.decode_step import DecodeWeights, Suspended


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers of one step share."""

    attend: Attend
    num_tokens: Tensor  # [1], those that are not padding
    decoding: bool  # whether all of them are of rows of one token


class Decoder:
    """A model with its weights. Steps write the KV cache and the batch's outputs and keep no other state."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor | QuantizedEmbedding,
        layers: list[LayerWeights],
        norm: Tensor,
        lm_head: Weight,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Take the weights: embedding [vocab, hidden], norm [hidden], lm_head [vocab, hidden] from pack_weight.

        kv_dtype: of keys and values in the KV cache; None: the weights'.
        """
        self.spec = spec
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.kv_dtype = kv_dtype or embedding.dtype
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._lm_head = lm_head
        # A GGUF file's: kernels made for decoding know none in its formats, and any layer may have some.
        self._has_gguf_weights = any(
            isinstance(weight, QuantizedEmbedding) for weight in list_weights([embedding, *layers, lm_head])
        )
        self._attentions = [layer.mixer for layer in spec.distinct_layers]
        ropes = list(dict.fromkeys(attention.rope for attention in self._attentions))
        self._rotary_tables = [self._make_rotary_table(rope) for rope in ropes]
        self._table_of = [ropes.index(layer.mixer.rope) for layer in spec.layers]

    @property
    def num_weight_bytes(self) -> int:
        """How many bytes the weights take; a step reads them all but for experts that no token has."""
        weights: list[object] = [self._embedding, *self._layers, self._norm]
        return count_bytes(weights if self._lm_head is self._embedding else [*weights, self._lm_head])

    def _make_rotary_table(self, rope: Rope) -> Tensor:
        return make_rotary_table(rope.frequencies(), self.spec.max_model_len, self.device, rope.magnitude)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KvCache:
        """Allocate a KV cache of zeros: one tensor for each group of layers."""
        # Zeros, because attention multiplies what it masks by 0, and uninitialised memory may hold NaN. Written, for
        # a host's memory would else be taken page by page while serving, and might then not be there.
        caches: dict[int, LayerCache] = {}
        for group in self.spec.cache_layout.groups:
            memory = torch.empty(group.shape(num_blocks, block_size), dtype=self.kv_dtype, device=self.device).zero_()
            caches.update(zip(group.layers, map(LayerCache, memory), strict=True))
        return tuple(caches[layer] for layer in sorted(caches))

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_cache: KvCache,
        num_tokens: int,
        num_rows: int,
        *,
        decoding: bool = False,
        scoring: bool = False,
    ) -> None:
        """Run one step over the batch's first num_tokens tokens and num_rows rows, padding included, and sample.

        decoding: whether every row is of one token, so that kernels made for that may run. scoring: whether the
        logprobs of the prompts' own tokens are wanted beside the samples.
        """
        if scoring:
            hidden = self.compute_hidden(batch, kv_cache, num_tokens, num_rows)
            score_prompts(hidden, self._compute_head, batch, num_rows)
            sample(self._compute_head(_take_last_tokens(hidden, batch, num_rows)), batch, num_rows)
            return
        sample(self.compute_logits(batch, kv_cache, num_tokens, num_rows, decoding=decoding), batch, num_rows)

    @torch.inference_mode()
    def compute_logits(
        self, batch: Batch, kv_cache: KvCache, num_tokens: int, num_rows: int, *, decoding: bool = False
    ) -> Tensor:
        """Run one step without sampling and return the logits [num_rows, vocab] of each row's last token."""
        if decoding and self._has_decode_kernels(num_rows, kv_cache):
            return self._decode(batch, kv_cache, num_rows)
        attend = self._make_attention(batch, kv_cache, num_tokens, num_rows, decoding=decoding)
        if not decoding and self._has_mixed_kernels(num_tokens, kv_cache):
            return self._mix(batch, (num_tokens, num_rows), attend)
        residual, step = self._embed(batch, num_tokens), _share(attend, batch, decoding=decoding)
        update = self._run_layers(range(len(self._layers)), residual, step)
        return self._sampled_logits(update, residual, batch, num_rows)

    @torch.inference_mode()
    def forward_segment(
        self,
        batch: Batch,
        kv_cache: KvCache,
        size: tuple[int, int, bool],
        layers: range,
        residual: Tensor,
        before: Suspended | None = None,
    ) -> Suspended | None:
        """Run some of a step's layers: with the first of all it begins, with the last it samples.

        size: the step's tokens and rows, padding included, and whether every row is of one token; residual:
        [max_tokens, hidden], all that a step keeps between its segments beside the batch and the KV cache, unless it
        runs on kernels made for decoding: then it is what the segment before returned, `before`.
        """
        num_tokens, num_rows, decoding = size
        if decoding and self._has_decode_kernels(num_rows, kv_cache):
            return self._decode_segment(batch, kv_cache, num_rows, layers, before)
        residual = residual[:num_tokens]
        if layers.start == 0:
            self._embed(batch, num_tokens, residual)
        attend = self._make_attention(batch, kv_cache, num_tokens, num_rows, decoding=decoding)
        update = self._run_layers(layers, residual, _share(attend, batch, decoding=decoding))
        if layers.stop < len(self._layers):
            residual.add_(update)
        else:
            sample(self._sampled_logits(update, residual, batch, num_rows), batch, num_rows)
        return None

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch, kv_cache: KvCache, num_tokens: int, num_rows: int) -> Tensor:
        """Return what the head reads of every token [num_tokens, hidden]."""
        attend = self._make_attention(batch, kv_cache, num_tokens, num_rows)
        residual = self._embed(batch, num_tokens)
        update = self._run_layers(range(len(self._layers)), residual, _share(attend, batch, decoding=False))
        return rms_norm(update, self._norm, self.spec.rms_norm_eps, residual)

    def _embed(self, batch: Batch, num_tokens: int, out: Tensor | None = None) -> Tensor:
        """Return what the layers begin with [tokens, hidden]; in `out` if that is given."""
        residual = self._take_embeddings(batch.input_ids[:num_tokens], out)
        scale = self.spec.embedding_scale
        return residual if scale == 1 else residual.mul_(scale)

    def _take_embeddings(self, ids: Tensor, out: Tensor | None) -> Tensor:
        if isinstance(self._embedding, Tensor):
            return torch.index_select(self._embedding, 0, ids, out=out)
        found = self._embedding.take_rows(ids)
        return found if out is None else out.copy_(found)

    def _run_layers(self, layers: range, residual: Tensor, step: StepInputs) -> Tensor:
        """Run some layers on residual [tokens, hidden]; return what the last of them is to add to it."""
        update = None
        for index in layers:
            update = self._run_layer(index, residual, update, step)
        assert update is not None
        return update

    def _sampled_logits(self, update: Tensor, residual: Tensor, batch: Batch, num_rows: int) -> Tensor:
        """Return the logits of each row's last token."""
        eps = self.spec.rms_norm_eps
        return self._compute_head(last_token_norm(update, self._norm, eps, residual, batch.query_starts, num_rows))

    def _compute_head(self, hidden: Tensor) -> Tensor:
        spec, logits = self.spec, linear(hidden, self._lm_head)
        if spec.logits_divisor != 1:
            logits.div_(spec.logits_divisor)
        if spec.logits_softcap:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def _make_attention(
        self, batch: Batch, kv_cache: KvCache, num_tokens: int, num_rows: int, *, decoding: bool = False
    ) -> Attend:
        if decoding and self._has_decode_attention(kv_cache):
            return self._make_decode_attention(batch, kv_cache)
        positions, kv_slots = batch.positions[:num_tokens], batch.kv_slots[:num_tokens]
        rotations = [table.index_select(0, positions) for table in self._rotary_tables]
        plan = plan_attention(batch, num_tokens, num_rows, self._attentions, kv_cache[0], self.dtype)

        def attend(qkv: Tensor, index: int) -> Tensor:
            layer, cache, rotation = self._layers[index], kv_cache[index], rotations[self._table_of[index]]
            query = rotate_and_store(qkv, rotation, kv_slots, cache, layer.head_norm, layer.attention.kv_scales)
            return paged_attention(query, cache, plan, layer.attention)

        return attend

    def _has_decode_attention(self, kv_cache: KvCache) -> bool:
        if self.device.type != "cuda":
            return False
        from blink.models.decode_step import refuses_attention

        return refuses_attention(self.spec, self.dtype, kv_cache[0].block_size) is None

    def _make_decode_attention(self, batch: Batch, kv_cache: KvCache) -> Attend:
        from blink.kernels.gpu.decode.attention import decode_attention

        def attend(qkv: Tensor, index: int) -> Tensor:
            layer, table = self._layers[index], self._rotary_tables[self._table_of[index]]
            scales = layer.attention.kv_scales
            return decode_attention(qkv, kv_cache[index], batch, table, layer.head_norm, kv_scales=scales)

        return attend

    @property
    def _may_have_kernels(self) -> bool:
        """Whether steps may run on kernels made for few tokens."""
        return self.device.type == "cuda" and not self._has_gguf_weights

    def _has_decode_kernels(self, num_rows: int, kv_cache: KvCache) -> bool:
        if not self._may_have_kernels:
            return False
        from blink.models.decode_step import can_multiply_packed, refuses

        refused = refuses(self.spec, self.dtype, num_rows, kv_cache[0].block_size)
        return refused is None and can_multiply_packed(self._layers, self._lm_head, num_rows)

    def _has_mixed_kernels(self, num_tokens: int, kv_cache: KvCache) -> bool:
        if not self._may_have_kernels:
            return False
        from blink.models.decode_step import can_mix

        return can_mix(self.spec, self.dtype, num_tokens, self._layers, kv_cache[0].block_size)

    def _decode(self, batch: Batch, kv_cache: KvCache, num_rows: int) -> Tensor:
        from blink.models.decode_step import compute_decode_logits

        return compute_decode_logits(self._list_decode_weights(), batch, kv_cache, num_rows)

    def _decode_segment(
        self, batch: Batch, kv_cache: KvCache, num_rows: int, layers: range, before: Suspended | None
    ) -> Suspended | None:
        from blink.models.decode_step import compute_decode_head, run_decode_layers

        weights = self._list_decode_weights()
        left = run_decode_layers(weights, batch, kv_cache, num_rows, layers, before)
        if layers.stop < len(self._layers):
            return left
        sample(compute_decode_head(weights, left), batch, num_rows)
        return None

    def _mix(self, batch: Batch, size: tuple[int, int], attend: Attend) -> Tensor:
        from blink.models.decode_step import compute_mixed_states

        num_tokens, num_rows = size
        states = compute_mixed_states(self._list_decode_weights(), batch, num_tokens, attend)
        last = _take_last_tokens(states, batch, num_rows)
        return self._compute_head(rms_norm(last, self._norm, self.spec.rms_norm_eps))

    def _list_decode_weights(self) -> DecodeWeights:
        from blink.models.decode_step import DecodeWeights

        tables = [self._rotary_tables[table] for table in self._table_of]
        return DecodeWeights(self.spec, plain(self._embedding), self._layers, self._norm, self._lm_head, tables)

    def _run_layer(self, index: int, residual: Tensor, update: Tensor | None, step: StepInputs) -> Tensor:
        """Add update, the previous layer's result, to residual (both [tokens, hidden]); return this layer's result."""
        layer, spec, eps = self._layers[index], self.spec.layers[index], self.spec.rms_norm_eps
        hidden = self._enter(residual, update, layer.attention_norm)
        qkv = linear(hidden, layer.qkv, layer.qkv_bias)
        if layer.wide_norm is not None:
            q_size, kv_size = spec.mixer.q_size, spec.mixer.kv_size
            keys = slice(q_size, q_size + kv_size)
            rms_norm_columns(qkv, slice(0, q_size), layer.wide_norm.query_weight, eps)
            rms_norm_columns(qkv, keys, layer.wide_norm.key_weight, eps)
        attended = linear(step.attend(qkv, index), layer.output, layer.output_bias)
        attended = self._leave(attended, layer.attention_end_norm, spec)
        hidden = self._enter(residual, attended, layer.mlp_norm)
        return self._leave(self._run_mlp(layer.mlp, spec.mlp.activation, hidden, step), layer.mlp_end_norm, spec)

    def _enter(self, residual: Tensor, update: Tensor | None, norm: Tensor | None) -> Tensor:
        """Add update to residual and return what attention or MLP reads: the sum, normalised if there is a norm."""
        if norm is None:
            return residual if update is None else residual.add_(update)
        if update is None:
            return rms_norm(residual, norm, self.spec.rms_norm_eps)
        return rms_norm(update, norm, self.spec.rms_norm_eps, residual)

    def _leave(self, update: Tensor, norm: Tensor | None, layer: LayerSpec) -> Tensor:
        """Return what attention or MLP adds to the residual."""
        if norm is not None:
            update = rms_norm(update, norm, self.spec.rms_norm_eps)
        scale = layer.residual_scale
        return update if scale == 1 else update.mul_(scale)

    @staticmethod
    def _run_mlp(mlp: DenseWeights | MoeWeights, activation: Activation, hidden: Tensor, step: StepInputs) -> Tensor:
        if isinstance(mlp, DenseWeights):
            return linear(gated_linear(hidden, mlp.gate_up, activation), mlp.down)
        return moe(
            hidden,
            linear(hidden, mlp.router, mlp.router_bias),
            mlp.gate_up,
            mlp.down,
            step.num_tokens,
            top_k=mlp.spec.router.top_k,
            renormalize=mlp.spec.router.renormalize,
            activation=activation,
            biases=mlp.biases,
            decoding=step.decoding,
        )


def _share(attend: Attend, batch: Batch, *, decoding: bool) -> StepInputs:
    return StepInputs(attend, batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1], decoding)


def _take_last_tokens(hidden: Tensor, batch: Batch, num_rows: int) -> Tensor:
    """Return the rows of hidden [tokens, hidden] that belong to each row's last token [num_rows, hidden]."""
    return hidden.index_select(0, (batch.query_starts[1 : num_rows + 1] - 1).clamp_(min=0))
