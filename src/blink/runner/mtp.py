# SPDX-License-Identifier: Apache-2.0
"""Run a model's layer that predicts one token further: a layer as the model's, which reads the model's hidden state.

Embedding and output layer are the model's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from blink.formats.base import plain, take_rows
from blink.kernels.batch import Batch
from blink.kernels.guesses import FindGuesses, Guesses
from blink.kernels.layer_cache import KvCache, LayerCache
from blink.kernels.rms_norm import rms_norm
from blink.models.decoder import Decoder
from blink.models.mtp import MtpHead
from blink.runner.attend import split_gates
from blink.runner.devices import code_of
from blink.runner.layer_drafter import DraftHeads, LayerDrafter, Projected
from blink.runner.matmul import linear
from blink.runner.run import Runner


class MtpDrafter(LayerDrafter):
    """The Drafter of such a layer."""

    reads_end = True

    def __init__(self, model: Decoder, head: MtpHead, num_drafts: int, find: FindGuesses | None = None) -> None:
        """Draft so many tokens behind each sample; find: the rows, None: as the model's device does."""
        layer, layers = head.layer, model.spec.layers
        alike = next(index for index in model.table_of if layers[index].mixer == head.spec.layers[0].mixer)
        table = model.rotary_tables[model.table_of[alike]]
        heads = DraftHeads(head.attention, table, layer.head_norm, layer.attention)
        super().__init__(heads, num_drafts, find or code_of(model.device).find_guesses)
        self._model, self._head, self._end = model, head, model.spec.num_layers
        own = replace(head.spec, max_model_len=1)  # rotations are the model's
        self._runner = Runner(Decoder(own, model.embedding, [layer], head.norm, model.lm_head, model.kv_dtype))
        self._kept: dict[int, Tensor] = {}  # by batch

    def reserve(self, batch: Batch, residual: Tensor) -> None:
        """Do nothing: what it keeps is read in the segment that runs the last layer."""

    def keep(self, batch: Batch, layer: int, residual: Tensor) -> None:
        """Keep the norm of the residual [tokens, hidden] that the model's last layer ends with."""
        if layer == self._end:
            normed = rms_norm(residual, plain(self._model.norm), self._model.spec.rms_norm_eps)
            self._kept[batch.header.data_ptr()] = normed

    def _take(self, batch: Batch, num_tokens: int) -> Tensor:
        """Return the model's hidden states."""
        return self._kept.pop(batch.header.data_ptr())[:num_tokens]

    def _project(self, ids: Tensor, hidden: Tensor) -> Projected:
        """Begin the layer with the product of both norms."""
        head, layer, eps = self._head, self._head.layer, self._model.spec.rms_norm_eps
        embeddings = take_rows(self._model.embedding, ids.to(torch.int32)).to(hidden.dtype)
        pair = rms_norm(embeddings, head.embedding_norm, eps), rms_norm(hidden, head.hidden_norm, eps)
        residual = linear(torch.cat(pair, dim=1), head.fusion)
        qkv = linear(rms_norm(residual, plain(layer.attention_norm), eps), layer.qkv, layer.qkv_bias)
        if not head.attention.output_gate:
            return Projected(residual, qkv)
        return Projected(residual, *split_gates(qkv, head.attention))

    def _end_layer(self, residual: Tensor, attended: Tensor, rows: Guesses, cache: LayerCache) -> Tensor:
        """Return the norm of the layer's residual [rows, hidden]."""
        residual = residual + linear(attended, self._head.layer.output, self._head.layer.output_bias)
        return self._runner.run_mlp(rows.step, KvCache({0: cache}), residual)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits behind each hidden state."""
        return linear(hidden, self._model.lm_head)
