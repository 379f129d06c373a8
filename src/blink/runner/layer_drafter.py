# SPDX-License-Identifier: Apache-2.0
"""LayerDrafter: drafts by one layer that reads hidden states of a step, and the tokens that follow; on every device.

An entry of its cache at position p is made of a hidden state at p and of the token at p + 1. For each further guess the
layer reads its own hidden state. Guesses are kept apart from the texts' entries. Nothing that it computes decides on a
result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.guesses import FindGuesses, Guesses, HeadTokens
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions, HeadNorm
from blink.kernels.rotary import rotate_and_store
from blink.models.layers import Attention
from blink.plan.site import Bucket


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """The heads of such a layer's attention."""

    attention: Attention
    rotary_table: Tensor  # float32 [positions, rotary_dim]
    norm: HeadNorm | None = None
    options: AttentionOptions = PLAIN_ATTENTION


class Projected(NamedTuple):
    """What a layer makes of its input before it attends."""

    residual: Tensor  # [tokens, hidden], which it adds to
    qkv: Tensor  # [tokens, heads and both of the key-value heads * head_dim]
    gates: Tensor | None = None  # [tokens, heads * head_dim], by which it multiplies what it attends to

    def gate(self, attended: Tensor) -> Tensor:
        """Multiply what some tokens attend to."""
        return attended if self.gates is None else attended * self.gates

    def take(self, rows: Tensor) -> Projected:
        """Return that of some tokens, without what is stored of them."""
        gates = None if self.gates is None else self.gates.index_select(0, rows)
        return Projected(self.residual.index_select(0, rows), self.qkv[:0], gates)


class LayerDrafter(ABC):
    """The Drafter of a layer: what it reads, what it computes around attention, and its vocabulary are a subclass's."""

    def __init__(self, heads: DraftHeads, num_drafts: int, find: FindGuesses, own: HeadTokens | None = None) -> None:
        """Draft so many tokens behind each sample; find: the rows; own: the tokens that it has, None: all."""
        self._heads, self._num_drafts, self._find_guesses, self._own = heads, num_drafts, find, own

    @abstractmethod
    def _take(self, batch: Batch, num_tokens: int) -> Tensor:
        """Return what it reads of a step's tokens [tokens, hidden], of which nothing is kept any more."""

    @abstractmethod
    def _project(self, ids: Tensor, hidden: Tensor) -> Projected:
        """Begin the layer with hidden states [tokens, hidden], and with the tokens behind them."""

    @abstractmethod
    def _end_layer(self, residual: Tensor, attended: Tensor, rows: Guesses, cache: LayerCache) -> Tensor:
        """Return the layer's hidden states [rows, hidden] behind attention and MLP; cache: the layer's."""

    @abstractmethod
    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits behind each hidden state [rows, tokens], of the tokens that the head has."""

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Read a step whose rows are sampled, and write batch.head_drafts; cache: the layer's of the KV cache.

        Where no guess is wanted, the layer's keys and values are all that is computed.
        """
        heads, hidden = self._heads, self._take(batch, size.tokens)
        sizes = size.tokens, size.rows
        rows = self._find_guesses(batch, sizes, self._num_drafts, heads.attention, hidden.dtype)
        made = self._project(rows.next_ids, hidden)
        rotation, kv_slots = self._rotation(batch.positions[: size.tokens]), batch.kv_slots[: size.tokens]
        query = rotate_and_store(made.qkv, rotation, kv_slots, cache, heads.norm, heads.options.kv_scales)
        if size.skips_guesses or len(rows.ends) == 0:
            return
        rows.open(cache)
        last = made.take(rows.ends)
        attended = rows.attend_last(query.index_select(0, rows.ends), heads.options)
        hidden = self._end_layer(last.residual, last.gate(attended), rows, cache)
        rows.write(self._guess(rows, cache, hidden))

    def _guess(self, rows: Guesses, cache: LayerCache, hidden: Tensor) -> Tensor:
        """Return the guessed tokens [rows, num_drafts]; hidden: what the layer made of each row's last token."""
        found, heads = [rows.sample(0, self._compute_logits(hidden), self._own)], self._heads
        for guess in range(1, self._num_drafts):
            made = self._project(found[-1], hidden)
            rotation = self._rotation(rows.positions(guess))
            attended = rows.attend(guess, made.qkv, rotation, heads.norm, heads.options)
            hidden = self._end_layer(made.residual, made.gate(attended), rows, cache)
            found.append(rows.sample(guess, self._compute_logits(hidden), self._own))
        return torch.stack(found, dim=1)

    def _rotation(self, positions: Tensor) -> Tensor:
        """Return the rotations at positions; beyond the longest text nobody takes a draft."""
        table = self._heads.rotary_table
        return table.index_select(0, positions.clamp(max=len(table) - 1))
