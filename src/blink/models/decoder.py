# SPDX-License-Identifier: Apache-2.0
"""The one decoder definition: attention with a dense or mixture-of-experts MLP, over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.batch import Batch, Header
from blink.kernels.linear import linear
from blink.kernels.moe import moe
from blink.kernels.operands import HeadNorm
from blink.kernels.rms_norm import last_token_norm, rms_norm
from blink.kernels.rotary import make_rotary_table, rotate_and_store
from blink.kernels.sampling import sample
from blink.kernels.silu_mul import silu_mul
from blink.models.layer import DenseMlp, Layer, MoeMlp
from blink.models.spec import ModelSpec

Attend = Callable[[Tensor, Tensor, HeadNorm | None], Tensor]  # from QKV [tokens, ...], with the layer's KV cache


class Decoder:
    """A model with its weights. Steps write the KV cache and the batch's outputs and keep no other state."""

    def __init__(self, spec: ModelSpec, embedding: Tensor, layers: list[Layer], norm: Tensor, lm_head: Tensor) -> None:
        """Take the weights: embedding [vocab, hidden], norm [hidden], lm_head [vocab, hidden] from pack_weight."""
        self.spec = spec
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._lm_head = lm_head
        self._rotary_table = make_rotary_table(spec.rope.frequencies(), spec.max_model_len, self.device)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Tensor:
        """Allocate a KV cache: [layers, 2, num_blocks, block_size, kv_heads, head_dim], zero."""
        # Zeros, because attention multiplies what it masks by 0, and uninitialised memory may hold NaN. Written, for
        # a host's memory would else be taken page by page while serving, and might then not be there.
        return torch.empty(
            self.spec.kv_cache_shape(num_blocks, block_size), dtype=self.dtype, device=self.device
        ).zero_()

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kv_cache: Tensor, num_tokens: int, num_rows: int, *, decoding: bool = False
    ) -> None:
        """Run one step over the batch's first num_tokens tokens and num_rows rows, padding included, and sample.

        decoding: whether every row is of one token, so that kernels made for that may run.
        """
        sample(self.compute_logits(batch, kv_cache, num_tokens, num_rows, decoding=decoding), batch, num_rows)

    @torch.inference_mode()
    def compute_logits(
        self, batch: Batch, kv_cache: Tensor, num_tokens: int, num_rows: int, *, decoding: bool = False
    ) -> Tensor:
        """Run one step without sampling and return the logits [num_rows, vocab] of each row's last token."""
        if decoding and self._has_decode_kernels(num_rows, kv_cache):
            return self._decode(batch, kv_cache, num_rows)
        attend = self._make_attention(batch, kv_cache, num_tokens, num_rows, decoding=decoding)
        residual = self._embedding.index_select(0, batch.input_ids[:num_tokens])
        update = self._run_layers(range(len(self._layers)), residual, batch, kv_cache, attend)
        return self._head(update, residual, batch, num_rows)

    @torch.inference_mode()
    def forward_segment(
        self, batch: Batch, kv_cache: Tensor, size: tuple[int, int, bool], layers: range, residual: Tensor
    ) -> None:
        """Run some of a step's layers: with the first of all it begins, with the last it samples.

        size: the step's tokens and rows, padding included, and whether every row is of one token; residual:
        [max_tokens, hidden], all that a step keeps between its segments beside the batch and the KV cache.
        """
        num_tokens, num_rows, decoding = size
        residual = residual[:num_tokens]
        if layers.start == 0:
            torch.index_select(self._embedding, 0, batch.input_ids[:num_tokens], out=residual)
        attend = self._make_attention(batch, kv_cache, num_tokens, num_rows, decoding=decoding)
        update = self._run_layers(layers, residual, batch, kv_cache, attend)
        if layers.stop < len(self._layers):
            residual.add_(update)
        else:
            sample(self._head(update, residual, batch, num_rows), batch, num_rows)

    def _run_layers(self, layers: range, residual: Tensor, batch: Batch, kv_cache: Tensor, attend: Attend) -> Tensor:
        """Run some layers on residual [tokens, hidden]; return what the last of them is to add to it."""
        not_padding = batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1]
        eps, update = self.spec.rms_norm_eps, None
        for index in layers:
            layer = self._layers[index]
            attended = self._run_attention(layer, residual, update, kv_cache[index], attend)
            update = self._run_mlp(layer.mlp, rms_norm(attended, layer.mlp_norm, eps, residual), not_padding)
        assert update is not None
        return update

    def _head(self, update: Tensor, residual: Tensor, batch: Batch, num_rows: int) -> Tensor:
        eps = self.spec.rms_norm_eps
        hidden = last_token_norm(update, self._norm, eps, residual, batch.query_starts, num_rows)
        return linear(hidden, self._lm_head)

    def _has_decode_kernels(self, num_rows: int, kv_cache: Tensor) -> bool:
        if self.device.type != "cuda":
            return False
        from blink.models.decode_step import can_decode

        return can_decode(self.spec, self.dtype, num_rows, kv_cache.shape[3])

    def _decode(self, batch: Batch, kv_cache: Tensor, num_rows: int) -> Tensor:
        from blink.models.decode_step import DecodeWeights, compute_decode_logits

        weights = DecodeWeights(self.spec, self._embedding, self._layers, self._norm, self._lm_head, self._rotary_table)
        return compute_decode_logits(weights, batch, kv_cache, num_rows)

    def _make_attention(
        self, batch: Batch, kv_cache: Tensor, num_tokens: int, num_rows: int, *, decoding: bool
    ) -> Attend:
        if decoding and self._has_decode_attention(kv_cache):
            return self._make_decode_attention(batch)
        rotation = self._rotary_table.index_select(0, batch.positions[:num_tokens])
        plan = plan_attention(batch, num_tokens, num_rows, self.spec.num_heads, kv_cache[0])

        def attend(qkv: Tensor, cache: Tensor, head_norm: HeadNorm | None) -> Tensor:
            query = rotate_and_store(qkv, rotation, batch.kv_slots[:num_tokens], cache, head_norm)
            return paged_attention(query, cache, plan)

        return attend

    def _has_decode_attention(self, kv_cache: Tensor) -> bool:
        if self.device.type != "cuda":
            return False
        from blink.models.decode_step import can_attend_rows

        return can_attend_rows(self.spec, self.dtype, kv_cache.shape[3])

    def _make_decode_attention(self, batch: Batch) -> Attend:
        from blink.kernels.gpu.decode.attention import decode_attention

        return lambda qkv, cache, norm: decode_attention(qkv, cache, batch, self._rotary_table, norm)

    def _run_attention(
        self, layer: Layer, residual: Tensor, update: Tensor | None, kv_cache: Tensor, attend: Attend
    ) -> Tensor:
        """Add update, the previous layer's result, to residual (both [tokens, hidden]); return attention's result."""
        eps = self.spec.rms_norm_eps
        if update is None:
            hidden = rms_norm(residual, layer.attention_norm, eps)
        else:
            hidden = rms_norm(update, layer.attention_norm, eps, residual)
        qkv = linear(hidden, layer.qkv, layer.qkv_bias)
        return linear(attend(qkv, kv_cache, layer.head_norm), layer.output, layer.output_bias)

    def _run_mlp(self, mlp: DenseMlp | MoeMlp, hidden: Tensor, num_tokens: Tensor) -> Tensor:
        if isinstance(mlp, DenseMlp):
            return linear(silu_mul(linear(hidden, mlp.gate_up)), mlp.down)
        return moe(
            hidden,
            linear(hidden, mlp.router),
            mlp.gate_up,
            mlp.down,
            num_tokens,
            top_k=self.spec.experts_per_token,
            renormalize=self.spec.norm_topk_prob,
        )
