# SPDX-License-Identifier: Apache-2.0
"""Rows whose next tokens a draft head guesses, on a CPU: no other rows are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu.attention import attend_group, plan_group
from blink.kernels.cpu.rotary import rotate_and_store
from blink.kernels.cpu.sampling import sample
from blink.kernels.guesses import FIRST_GUESS, RESTS_UNTIL, TEXT_LENGTH, HeadTokens, guessed_batch, spread
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions, HeadNorm

if TYPE_CHECKING:
    from blink.models.layers import Attention


class CpuGuesses:
    """The rows, whose guesses go to a copy of their cache: it has room for them."""

    def __init__(
        self, batch: Batch, size: tuple[int, int], num_guesses: int, attention: Attention, dtype: torch.dtype
    ) -> None:
        """Find them in a sampled step, as FindGuesses."""
        del attention
        num_tokens, num_rows = size
        self._batch, self._num_guesses, self._dtype = batch, num_guesses, dtype
        self.next_ids = _next_tokens(batch, num_tokens, num_rows)
        self.ends, self.slots, self._positions = _find_ends(batch, num_rows)
        header = batch.header.clone()
        header[Header.NUM_ROWS] = len(self.ends)
        self._guessed = replace(guessed_batch(batch, self.slots.to(torch.int32)), header=header)

    def open(self, cache: LayerCache) -> None:
        """Copy what rows have in the cache."""
        batch, num_rows = self._batch, len(self.ends)
        self.step = replace(batch, header=torch.full_like(batch.header, num_rows))
        lens = (self._positions + 1).to(torch.int32)
        group = plan_group(batch.block_tables, self.slots, lens, [0, 1], 0, cache.block_size, self._dtype)
        cells = cache.cells.view(torch.uint8) if cache.dtype == FP8 else cache.cells
        copied = cells.index_select(1, group.blocks).unflatten(1, (num_rows, -1)).flatten(2, 3)
        room = torch.zeros_like(copied[:, :, :1]).expand(-1, -1, self._num_guesses, -1, -1)
        self._cache = LayerCache(torch.cat((copied, room), dim=2).view(cache.dtype))
        self._tables = torch.arange(num_rows, dtype=torch.int32)[:, None]
        self._rows, self._lens = torch.arange(num_rows), lens

    def positions(self, guess: int) -> Tensor:
        """Return where each row's guess of a number stands."""
        return self._positions + guess

    def attend_last(self, query: Tensor, options: AttentionOptions = PLAIN_ATTENTION) -> Tensor:
        """Attend from each row's last token."""
        return self._attend(query, self._lens, options)

    def attend(
        self,
        guess: int,
        qkv: Tensor,
        rotation: Tensor,
        norm: HeadNorm | None = None,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """Attend from each row's guess of a number, which is stored before."""
        cache, lens = self._cache, self._lens + guess
        kv_slots = (self._rows * cache.block_size + lens - 1).to(torch.int32)
        query = rotate_and_store(qkv, rotation, kv_slots, cache, norm, options.kv_scales)
        return self._attend(query, lens, options)

    def _attend(self, query: Tensor, lens: Tensor, options: AttentionOptions) -> Tensor:
        cache = self._cache
        group = plan_group(self._tables, self._rows, lens, [0, 1], 0, cache.block_size, query.dtype)
        return attend_group(query, cache, group, options).reshape(len(lens), -1)

    def sample(self, guess: int, logits: Tensor, own: HeadTokens | None = None) -> Tensor:
        """Sample each row's guess of a number."""
        lens = (self._positions + 2 + guess).clamp(max=self._batch.tokens.shape[1])
        rows = replace(self._guessed, context_lens=lens.to(torch.int32))
        sample(spread(logits, own), rows, len(lens))
        return rows.sampled_tokens.clamp(min=0).long()

    def write(self, tokens: Tensor) -> None:
        """Write guessed tokens, for texts with the token that was sampled."""
        lengths = self._positions + 2
        counts = torch.full_like(lengths, self._num_guesses)
        words = torch.cat((lengths[:, None], counts[:, None], tokens), dim=1)
        self._batch.head_drafts[self.slots, TEXT_LENGTH : FIRST_GUESS + self._num_guesses] = words.to(torch.int32)


def _next_tokens(batch: Batch, num_tokens: int, num_rows: int) -> Tensor:
    """Return the token behind each of a step's, int64 [tokens]: of its prompt where that goes on, else the sample."""
    ids = batch.input_ids[:num_tokens].roll(-1).long()
    ends = batch.query_starts[1 : num_rows + 1].long() - 1
    slots, positions = batch.row_slots[:num_rows].long(), batch.positions[ends].long() + 1
    known = batch.tokens[slots, positions.clamp(max=batch.tokens.shape[1] - 1)]
    is_known = positions < batch.params[slots, Param.NUM_PROMPT_TOKENS]
    ids[ends] = torch.where(is_known, known, batch.sampled_tokens[:num_rows]).clamp(min=0).long()
    return ids


def _find_ends(batch: Batch, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find each slot's last sure row that is of use; return its last token in the step, its slot and its position."""
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
    is_wanted &= lengths >= batch.head_drafts[found, RESTS_UNTIL]
    return tokens[is_wanted], found[is_wanted], positions[is_wanted]
