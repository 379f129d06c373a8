# SPDX-License-Identifier: Apache-2.0
"""Run an EAGLE-3 head: after each step it reads the step's tokens, and guesses what follows each sample.

An entry of its cache at position p is made of the model's residuals at p and of the token at p + 1. Guessed tokens are
kept apart from the texts' entries, because their residuals are the head's own. Nothing that it computes decides on a
result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import take_rows
from blink.kernels.batch import Batch
from blink.kernels.guesses import FindGuesses, Guesses, HeadTokens
from blink.kernels.layer_cache import LayerCache
from blink.kernels.rms_norm import rms_norm
from blink.kernels.rotary import rotate_and_store
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.plan.site import Bucket
from blink.runner.devices import code_of
from blink.runner.matmul import gated_linear, linear


class EagleDrafter:
    """The Drafter of an EAGLE-3 head."""

    reads_end = False

    def __init__(self, model: Decoder, head: EagleHead, num_drafts: int, find: FindGuesses | None = None) -> None:
        """Draft so many tokens behind each sample; find: the rows, None: as the model's device does."""
        self._head, self._layers = head, sorted({*head.layers})
        self._embedding = model.embedding if head.embedding is None else head.embedding
        self._num_drafts, self._own = num_drafts, HeadTokens(head.tokens, model.spec.vocab_size)
        self._find_guesses = find or code_of(model.device).find_guesses
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

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Read a step whose rows are sampled, and write batch.head_drafts; cache: the head's layer of the KV cache.

        Where no guess is wanted, the head's keys and values are all that is computed.
        """
        kept, head = self._kept.pop(batch.header.data_ptr()), self._head
        inputs = torch.cat([kept[layer][: size.tokens] for layer in head.layers], dim=1)
        fused = linear(inputs, head.fusion)
        rows = self._find_guesses(batch, (size.tokens, size.rows), self._num_drafts, head.attention, fused.dtype)
        residual, qkv = self._begin_layer(rows.next_ids, fused)
        rotation = self._rotation(batch.positions[: size.tokens])
        query = rotate_and_store(qkv, rotation, batch.kv_slots[: size.tokens], cache)
        if size.skips_guesses or len(rows.ends) == 0:
            return
        rows.open(cache)
        attended = rows.attend_last(query.index_select(0, rows.ends))
        rows.write(self._guess(rows, self._end_layer(residual.index_select(0, rows.ends), attended)))

    def _guess(self, rows: Guesses, hidden: Tensor) -> Tensor:
        """Return the guessed tokens [rows, num_drafts]; hidden: what the layer made of each row's last token."""
        found = [rows.sample(0, self._compute_logits(hidden), self._own)]
        for guess in range(1, self._num_drafts):
            residual, qkv = self._begin_layer(found[-1], hidden)
            attended = rows.attend(guess, qkv, self._rotation(rows.positions(guess)))
            hidden = self._end_layer(residual, attended)
            found.append(rows.sample(guess, self._compute_logits(hidden), self._own))
        return torch.stack(found, dim=1)

    def _begin_layer(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to [tokens, hidden], and QKV, of hidden states and of the tokens behind them."""
        head = self._head
        embeddings = take_rows(self._embedding, ids.to(torch.int32)).to(hidden.dtype)
        normed = rms_norm(hidden, head.hidden_norm, head.eps)
        pair = torch.cat((rms_norm(embeddings, head.embedding_norm, head.eps), normed), dim=1)
        return normed if head.residual_is_normed else hidden, linear(pair, head.qkv)

    def _end_layer(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's residual [rows, hidden] behind attention and MLP."""
        head = self._head
        residual = residual + linear(attended, head.output)
        inner = gated_linear(rms_norm(residual, head.mlp_norm, head.eps), head.mlp.gate_up, head.mlp.activation)
        return residual + linear(inner, head.mlp.down)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits behind each hidden state [rows, tokens], of the tokens that the head has."""
        return linear(rms_norm(hidden, self._head.norm, self._head.eps), self._head.lm_head)

    def _rotation(self, positions: Tensor) -> Tensor:
        table = self._head.rotary_table
        return table.index_select(0, positions.clamp(max=len(table) - 1))
