# SPDX-License-Identifier: Apache-2.0
"""Run an EAGLE-3 head: a layer that reads residuals of several of the model's layers, with a vocabulary of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import take_rows
from blink.kernels.batch import Batch
from blink.kernels.guesses import FindGuesses, Guesses, HeadTokens
from blink.kernels.layer_cache import LayerCache
from blink.kernels.rms_norm import rms_norm
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.runner.devices import code_of
from blink.runner.layer_drafter import DraftHeads, LayerDrafter, Projected
from blink.runner.matmul import gated_linear, linear


class EagleDrafter(LayerDrafter):
    """The Drafter of an EAGLE-3 head."""

    reads_end = False

    def __init__(self, model: Decoder, head: EagleHead, num_drafts: int, find: FindGuesses | None = None) -> None:
        """Draft so many tokens behind each sample; find: the rows, None: as the model's device does."""
        find = find or code_of(model.device).find_guesses
        own = HeadTokens(head.tokens, model.spec.vocab_size)
        super().__init__(DraftHeads(head.attention, head.rotary_table), num_drafts, find, own)
        self._head, self._layers = head, sorted({*head.layers})
        self._embedding = model.embedding if head.embedding is None else head.embedding
        self._kept: dict[int, dict[int, Tensor]] = {}  # by batch, then by layer
        self._memory: dict[int, Tensor] = {}  # by batch: [layers, tokens, hidden]

    def reserve(self, batch: Batch, residual: Tensor) -> None:
        """Keep what is like a residual [max_tokens, hidden] in memory of the batch: its steps are captured in parts."""
        self._memory[batch.header.data_ptr()] = residual.new_empty(len(self._layers), *residual.shape)

    def keep(self, batch: Batch, layer: int, residual: Tensor) -> None:
        """Copy the residual [tokens, hidden] of a step as a layer begins, if the head reads it."""
        if layer not in self._layers:
            return
        key = batch.header.data_ptr()
        if (memory := self._memory.get(key)) is None:
            kept = residual.clone()
        else:
            kept = memory[self._layers.index(layer), : len(residual)].copy_(residual)
        self._kept.setdefault(key, {})[layer] = kept

    def _take(self, batch: Batch, num_tokens: int) -> Tensor:
        """Return the product of all that it reads [tokens, hidden]."""
        kept = self._kept.pop(batch.header.data_ptr())
        inputs = torch.cat([kept[layer][:num_tokens] for layer in self._head.layers], dim=1)
        return linear(inputs, self._head.fusion)

    def _project(self, ids: Tensor, hidden: Tensor) -> Projected:
        """Begin the layer."""
        head = self._head
        embeddings = take_rows(self._embedding, ids.to(torch.int32)).to(hidden.dtype)
        normed = rms_norm(hidden, head.hidden_norm, head.eps)
        pair = torch.cat((rms_norm(embeddings, head.embedding_norm, head.eps), normed), dim=1)
        return Projected(normed if head.residual_is_normed else hidden, linear(pair, head.qkv))

    def _end_layer(self, residual: Tensor, attended: Tensor, rows: Guesses, cache: LayerCache) -> Tensor:
        """Return the layer's residual [rows, hidden] behind attention and MLP."""
        del rows, cache
        head = self._head
        residual = residual + linear(attended, head.output)
        inner = gated_linear(rms_norm(residual, head.mlp_norm, head.eps), head.mlp.gate_up, head.mlp.activation)
        return residual + linear(inner, head.mlp.down)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of its own tokens behind each residual."""
        return linear(rms_norm(hidden, self._head.norm, self._head.eps), self._head.lm_head)
