# SPDX-License-Identifier: Apache-2.0
"""Run an EAGLE-3 head on the CPU: after each step it reads the step's tokens, and guesses what follows each sample.

An entry of its cache at position p is made of the model's residuals at p and of the token at p + 1. Guessed tokens are
not written to the cache, because their residuals are the head's own. Nothing that it computes decides on a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blink.formats.base import take_rows
from blink.formats.fp8 import FP8
from blink.kernels.attention import paged_attention, plan_attention
from blink.kernels.batch import Batch, Param
from blink.kernels.cpu.attention import attend_group, plan_group
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION
from blink.kernels.rms_norm import rms_norm
from blink.kernels.rotary import rotate_and_store
from blink.models.decoder import Decoder
from blink.models.eagle import EagleHead
from blink.plan.site import Bucket
from blink.runner.matmul import gated_linear, linear

_Attend = Callable[[Tensor], Tensor]
_RESTS_UNTIL = 0  # the word of csrc's HeadDraft that the scheduler writes; the text's length, a count and tokens follow


class Ends(NamedTuple):
    """The rows behind which tokens are guessed."""

    tokens: Tensor  # int64 [rows]; of the step, each row's last
    slots: Tensor  # int64
    positions: Tensor  # int64; of these tokens in their texts


class EagleDrafter:
    """The Drafter of an EAGLE-3 head."""

    reads_end = False

    def __init__(self, model: Decoder, head: EagleHead, num_drafts: int) -> None:
        """Draft so many tokens behind each sample."""
        self._head = head
        self._embedding = model.embedding if head.embedding is None else head.embedding
        self._num_drafts = num_drafts
        self._kept: dict[int, dict[int, Tensor]] = {}  # by batch, then by layer

    def keep(self, batch: Batch, layer: int, residual: Tensor) -> None:
        """Copy the residual [tokens, hidden] of a step as a layer begins, if the head reads it."""
        if layer in self._head.layers:
            self._kept.setdefault(batch.header.data_ptr(), {})[layer] = residual.clone()

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Read a step whose rows are sampled, and write batch.head_drafts; cache: the head's layer of the KV cache."""
        kept = self._kept.pop(batch.header.data_ptr())
        fused = linear(torch.cat([kept[layer] for layer in self._head.layers], dim=1), self._head.fusion)
        plan = plan_attention(batch, size.tokens, size.rows, (), cache, fused.dtype)
        rotation = self._rotation(batch.positions[: size.tokens])

        def attend(qkv: Tensor) -> Tensor:
            query = rotate_and_store(qkv, rotation, batch.kv_slots[: size.tokens], cache)
            return paged_attention(query, cache, plan)

        hidden = self._run_layer(next_tokens(batch, size), fused, attend)
        ends = find_ends(batch, size.rows)
        if len(ends.tokens):
            write_drafts(batch, ends, self._guess(batch, cache, ends, hidden.index_select(0, ends.tokens)))

    def _guess(self, batch: Batch, cache: LayerCache, ends: Ends, hidden: Tensor) -> Tensor:
        """Return the guessed tokens [rows, num_drafts]; hidden: what the layer made of each row's last token."""
        found = [self._choose(hidden)]
        context = _Context(batch, cache, ends, self._num_drafts) if self._num_drafts > 1 else None
        for step in range(1, self._num_drafts):
            assert context is not None
            rotation = self._rotation(ends.positions + step)
            hidden = self._run_layer(found[-1], hidden, context.attend_at(step, rotation))
            found.append(self._choose(hidden))
        return torch.stack(found, dim=1)

    def _run_layer(self, ids: Tensor, hidden: Tensor, attend: _Attend) -> Tensor:
        """Return the layer's residual [tokens, hidden] of hidden states and of the tokens behind them."""
        head = self._head
        embeddings = take_rows(self._embedding, ids.to(torch.int32)).to(hidden.dtype)
        normed = rms_norm(hidden, head.hidden_norm, head.eps)
        pair = torch.cat((rms_norm(embeddings, head.embedding_norm, head.eps), normed), dim=1)
        residual = normed if head.residual_is_normed else hidden
        residual = residual + linear(attend(linear(pair, head.qkv)), head.output)
        inner = gated_linear(rms_norm(residual, head.mlp_norm, head.eps), head.mlp.gate_up, head.mlp.activation)
        return residual + linear(inner, head.mlp.down)

    def _choose(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token behind each hidden state, int64 [rows], of the model's vocabulary."""
        logits = linear(rms_norm(hidden, self._head.norm, self._head.eps), self._head.lm_head)
        return self._head.tokens.index_select(0, logits.argmax(-1))

    def _rotation(self, positions: Tensor) -> Tensor:
        table = self._head.rotary_table
        return table.index_select(0, positions.clamp(max=len(table) - 1))


class _Context:
    """What rows attend to while tokens are guessed: a copy of their cache, with room for the guesses of each."""

    def __init__(self, batch: Batch, cache: LayerCache, ends: Ends, num_drafts: int) -> None:
        lens, num_rows = (ends.positions + 1).to(torch.int32), len(ends.slots)
        group = plan_group(batch.block_tables, ends.slots, lens, [0, 1], 0, cache.block_size, cache.dtype)
        cells = cache.cells.view(torch.uint8) if cache.dtype == FP8 else cache.cells
        copied = cells.index_select(1, group.blocks).unflatten(1, (num_rows, -1)).flatten(2, 3)
        room = torch.zeros_like(copied[:, :, :1]).expand(-1, -1, num_drafts, -1, -1)
        self._cache = LayerCache(torch.cat((copied, room), dim=2).view(cache.dtype))
        self._tables = torch.arange(num_rows, dtype=torch.int32)[:, None]
        self._rows, self._lens = torch.arange(num_rows), lens

    def attend_at(self, step: int, rotation: Tensor) -> _Attend:
        """Return what attends from each row's guess of a number, which it stores before."""
        cache, lens = self._cache, self._lens + step
        kv_slots = (self._rows * cache.block_size + lens - 1).to(torch.int32)

        def attend(qkv: Tensor) -> Tensor:
            query = rotate_and_store(qkv, rotation, kv_slots, cache)
            group = plan_group(self._tables, self._rows, lens, [0, 1], 0, cache.block_size, query.dtype)
            return attend_group(query, cache, group, PLAIN_ATTENTION).reshape(len(lens), -1)

        return attend


def write_drafts(batch: Batch, ends: Ends, drafts: Tensor) -> None:
    """Give the scheduler the tokens [rows, num_drafts] that were guessed."""
    lengths = ends.positions + 2  # with the token that was sampled
    counts = torch.full_like(lengths, drafts.shape[1])
    words = torch.cat((lengths[:, None], counts[:, None], drafts), dim=1)
    batch.head_drafts[ends.slots, 1 : 1 + words.shape[1]] = words.to(torch.int32)


def next_tokens(batch: Batch, size: Bucket) -> Tensor:
    """Return the token behind each of a step's, int64 [tokens]: of its prompt where that goes on, else the sample."""
    ids = batch.input_ids[: size.tokens].roll(-1).long()
    ends = batch.query_starts[1 : size.rows + 1].long() - 1
    slots, positions = batch.row_slots[: size.rows].long(), batch.positions[ends].long() + 1
    known = batch.tokens[slots, positions.clamp(max=batch.tokens.shape[1] - 1)]
    is_known = positions < batch.params[slots, Param.NUM_PROMPT_TOKENS]
    ids[ends] = torch.where(is_known, known, batch.sampled_tokens[: size.rows]).clamp(min=0).long()
    return ids


def find_ends(batch: Batch, num_rows: int) -> Ends:
    """Find each slot's last row whose token is sure, where a draft behind its sample is of use.

    A row that verifies a draft follows its slot's row before. It is sure if that sampled its token.
    """
    starts, row_slots = batch.query_starts[: num_rows + 1].long(), batch.row_slots[:num_rows].long()
    slots, sampled = row_slots.tolist(), batch.sampled_tokens[:num_rows].tolist()
    ids = batch.input_ids[starts[:-1]].tolist()
    last: dict[int, int] = {}
    for row, slot in enumerate(slots):
        before = last.get(slot)
        if before is None or (before == row - 1 and ids[row] == sampled[before]):
            last[slot] = row
    rows = torch.tensor([row for row in last.values() if sampled[row] >= 0], dtype=torch.int64)
    tokens, found = starts[1:][rows] - 1, row_slots[rows]
    positions = batch.positions[tokens].long()
    lengths = positions + 2  # with the sample
    is_wanted = lengths > batch.params[found, Param.NUM_PROMPT_TOKENS]
    is_wanted &= lengths >= batch.head_drafts[found, _RESTS_UNTIL]
    return Ends(tokens[is_wanted], found[is_wanted], positions[is_wanted])
