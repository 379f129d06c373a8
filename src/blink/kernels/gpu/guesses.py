# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
"""Rows whose next tokens a draft head guesses, on a GPU: all rows of a bucket, of which some attend to nothing.

Guesses go to the last blocks of the head's cache, which the scheduler does not hand out: count_blocks() for each row.
The tokens before them in a block that is not full are copied there. So sizes depend on the bucket alone, and a captured
graph serves every batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from blink.kernels.batch import Batch, Header, Param
from blink.kernels.gpu.attention.paged import paged_attention
from blink.kernels.gpu.attention.plan import plan_attention
from blink.kernels.gpu.constraint import allow_all
from blink.kernels.gpu.rotary import rotate_and_store
from blink.kernels.gpu.sampling import sample
from blink.kernels.guesses import (
    FIRST_GUESS,
    MOST_GUESSES,
    NUM_GUESSES,
    RESTS_UNTIL,
    TEXT_LENGTH,
    HeadTokens,
    count_blocks,
    guessed_batch,
    spread,
)
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions, HeadNorm

if TYPE_CHECKING:
    from blink.models.layers import Attention

_WORDS = 1024  # that a program copies
_NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
_NUM_PROMPT_TOKENS = tl.constexpr(int(Param.NUM_PROMPT_TOKENS))
_RESTS_UNTIL, _TEXT_LENGTH = tl.constexpr(RESTS_UNTIL), tl.constexpr(TEXT_LENGTH)
_NUM_GUESSES, _FIRST_GUESS = tl.constexpr(NUM_GUESSES), tl.constexpr(FIRST_GUESS)


class GpuGuesses:
    """The rows of a bucket, padding included."""

    def __init__(
        self, batch: Batch, size: tuple[int, int], num_guesses: int, attention: Attention, dtype: torch.dtype
    ) -> None:
        """Find them in a sampled step, as FindGuesses."""
        num_tokens, num_rows = size
        self._batch, self._num_rows, self._num_guesses = batch, num_rows, num_guesses
        self._attention, self._dtype = attention, dtype
        self.next_ids = batch.input_ids[:num_tokens].roll(-1)
        self.ends, self._contexts = batch.row_slots.new_empty(2, num_rows)
        _find_rows[(num_rows,)](
            *(batch.header, batch.input_ids, batch.positions, batch.query_starts, batch.row_slots),
            *(batch.sampled_tokens, batch.tokens, batch.params, batch.head_drafts),
            *(self.next_ids, self.ends, self._contexts),
            *(batch.tokens.stride(0), batch.params.stride(0), batch.head_drafts.stride(0)),
            LAST_POSITION=batch.tokens.shape[1] - 1,
            ROWS_OF_SLOT=triton.next_power_of_2(1 + MOST_GUESSES),
            num_warps=1,
        )

    def open(self, cache: LayerCache) -> None:
        """Place guesses behind what rows have in the cache."""
        batch, rows, device = self._batch, self._num_rows, self._contexts.device
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        header = torch.full_like(batch.header, rows)  # that all rows decode, of which not all are a step's
        header[Header.NUM_TOKENS].copy_(batch.header[Header.NUM_ROWS])
        last = self.step = replace(batch, header=header, query_starts=starts, context_lens=self._contexts)
        self._cache, self._steps = cache, [last]
        if self._num_guesses > 1:
            tables, lens = self._place_guesses(cache)
            self._steps += [replace(last, row_slots=starts, context_lens=one, block_tables=tables) for one in lens]

    def _place_guesses(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Copy the blocks that are not full; return rows' tables, and the tokens that each guess of theirs sees."""
        batch, rows = self._batch, self._num_rows
        blocks = count_blocks(self._num_guesses, cache.block_size)
        first_block = cache.num_blocks - rows * blocks
        assert first_block > 0
        tables = batch.block_tables.new_empty(rows, batch.block_tables.shape[1] + blocks)
        guesses = self._contexts.new_empty(3, self._num_guesses - 1, rows)
        self._positions, lens, self._kv_slots = guesses
        sizes = {"BLOCKS_OF_ROW": blocks, "BLOCK_SIZE": cache.block_size, "num_warps": 4}
        _place_guesses[(rows, triton.cdiv(tables.shape[1], _WORDS))](
            *(batch.block_tables, batch.row_slots, self._contexts, tables, guesses, first_block),
            *(batch.block_tables.stride(0), tables.stride(0), rows),
            COUNT=self._num_guesses - 1,
            GUESSES=triton.next_power_of_2(self._num_guesses),
            WORDS=_WORDS,
            **sizes,
        )
        memory = cache.cells.view(torch.int32).flatten(2)
        parts, _, words = memory.shape
        _copy_blocks[(rows, parts, triton.cdiv(words, _WORDS))](
            *(memory, batch.block_tables, batch.row_slots, self._contexts, first_block),
            *(batch.block_tables.stride(0), memory.stride(0)),
            CELL_WORDS=words,
            WORDS=_WORDS,
            **sizes,
        )
        return tables, lens

    def positions(self, guess: int) -> Tensor:
        """Return where each row's guess of a number stands."""
        return self._positions[guess - 1]

    def attend_last(self, query: Tensor, options: AttentionOptions = PLAIN_ATTENTION) -> Tensor:
        """Attend from each row's last token."""
        return self._attend(query, self._steps[0], options)

    def attend(
        self,
        guess: int,
        qkv: Tensor,
        rotation: Tensor,
        norm: HeadNorm | None = None,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """Attend from each row's guess of a number, which is stored before."""
        query = rotate_and_store(qkv, rotation, self._kv_slots[guess - 1], self._cache, norm, options.kv_scales)
        return self._attend(query, self._steps[guess], options)

    def _attend(self, query: Tensor, step: Batch, options: AttentionOptions) -> Tensor:
        rows = self._num_rows
        plan = plan_attention(step, rows, rows, (self._attention,), self._cache, self._dtype)
        return paged_attention(query, self._cache, plan, options)

    def sample(self, guess: int, logits: Tensor, own: HeadTokens | None = None) -> Tensor:
        """Sample each row's guess of a number."""
        if guess == 0:
            self._guessed = guessed_batch(self._batch, self._batch.row_slots[: self._num_rows])
            self._allowed = allow_all(self._batch, self._num_rows)
        lens = (self._contexts + 1 + guess).clamp(max=self._batch.tokens.shape[1])
        rows = replace(self._guessed, context_lens=lens, sampled_tokens=torch.zeros_like(lens))
        sample(spread(logits, own), rows, self._num_rows, allowed=self._allowed)
        return rows.sampled_tokens.clamp(min=0).long()

    def write(self, tokens: Tensor) -> None:
        """Write guessed tokens of rows that are guessed behind."""
        batch, count = self._batch, tokens.shape[1]
        assert tokens.is_contiguous()
        _write_guesses[(self._num_rows,)](
            *(tokens, self._contexts, batch.row_slots, batch.head_drafts, batch.head_drafts.stride(0)),
            COUNT=count,
            GUESSES=triton.next_power_of_2(count),
            num_warps=1,
        )


@triton.jit
def _find_rows(
    header, input_ids, positions, query_starts, row_slots, sampled_tokens, tokens, slot_params, head_drafts,
    next_ids, ends, contexts, tokens_stride, params_stride, head_stride,
    LAST_POSITION: tl.constexpr, ROWS_OF_SLOT: tl.constexpr,
):  # fmt: skip
    """Write the token behind a row's last one, that one's place, and the row's tokens in the cache; 0: no guess."""
    row, num_rows = tl.program_id(0), tl.load(header + _NUM_ROWS)
    is_row = row < num_rows
    slot = tl.load(row_slots + row, mask=is_row, other=0).to(tl.int64)
    end = tl.load(query_starts + row + 1, mask=is_row, other=1) - 1
    sample = tl.load(sampled_tokens + row, mask=is_row, other=-1)
    after = tl.load(positions + end, mask=is_row, other=0) + 1  # where the next token stands
    num_prompt = tl.load(slot_params + slot * params_stride + _NUM_PROMPT_TOKENS)
    known = tl.load(tokens + slot * tokens_stride + tl.minimum(after, LAST_POSITION))
    tl.store(next_ids + end, tl.maximum(tl.where(after < num_prompt, known, sample), 0), mask=is_row)
    # The slot's rows up to this one, and the one behind it: which of them have the token that the one before sampled.
    own = row + 1 - tl.arange(0, ROWS_OF_SLOT)
    inside = (own > 0) & (own < num_rows)
    of_slot = tl.load(row_slots + own, mask=inside, other=-1) == slot
    follows = inside & of_slot & (tl.load(row_slots + own - 1, mask=inside, other=-1) == slot)
    token = tl.load(input_ids + tl.load(query_starts + own, mask=follows, other=0), mask=follows, other=0)
    is_kept = token == tl.load(sampled_tokens + own - 1, mask=follows, other=0)
    is_wrong = tl.max((follows & (own <= row) & ~is_kept).to(tl.int32), axis=0) > 0
    goes_on = tl.max((follows & (own > row) & is_kept).to(tl.int32), axis=0) > 0
    rests_until = tl.load(head_drafts + slot * head_stride + _RESTS_UNTIL)
    is_of_use = (after + 1 > num_prompt) & (after + 1 >= rests_until)
    is_wanted = is_row & (sample >= 0) & is_of_use & (is_wrong == 0) & (goes_on == 0)
    tl.store(ends + row, tl.where(is_row, end, 0))
    tl.store(contexts + row, tl.where(is_wanted, after, 0))


@triton.jit
def _place_guesses(
    block_tables, row_slots, contexts, tables, guesses, first_block, table_stride, own_stride, num_rows,
    COUNT: tl.constexpr, GUESSES: tl.constexpr, WORDS: tl.constexpr, BLOCKS_OF_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write a row's table, and of each guess its position, the tokens that it sees and its place in the cache."""
    row = tl.program_id(0)
    context = tl.load(contexts + row)
    full, own_block = context // BLOCK_SIZE, first_block + row * BLOCKS_OF_ROW
    slot = tl.load(row_slots + row, mask=context > 0, other=0).to(tl.int64)
    index = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    shared = tl.load(block_tables + slot * table_stride + index, mask=index < full, other=0)
    end = tl.where(context > 0, full + BLOCKS_OF_ROW, 0)
    tl.store(
        tables + row.to(tl.int64) * own_stride + index,
        tl.where(index < full, shared, own_block + index - full),
        mask=index < end,
    )
    if tl.program_id(1) == 0:
        guess = tl.arange(0, GUESSES)
        inside = guess < COUNT
        position = context + guess
        behind = position - full * BLOCK_SIZE  # in the row's own blocks
        place = (own_block + behind // BLOCK_SIZE) * BLOCK_SIZE + behind % BLOCK_SIZE
        target = guesses + guess * num_rows + row
        tl.store(target, position, mask=inside)
        tl.store(target + COUNT * num_rows, tl.where(context > 0, position + 1, 0), mask=inside)
        tl.store(target + 2 * COUNT * num_rows, tl.where(context > 0, place, -1), mask=inside)


@triton.jit
def _copy_blocks(
    cells, block_tables, row_slots, contexts, first_block, table_stride, part_stride,
    CELL_WORDS: tl.constexpr, WORDS: tl.constexpr, BLOCKS_OF_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Copy some words of a row's last block to its first own one, if tokens stand there."""
    row, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + row)
    if context % BLOCK_SIZE > 0:
        slot = tl.load(row_slots + row).to(tl.int64)
        source = tl.load(block_tables + slot * table_stride + context // BLOCK_SIZE).to(tl.int64)
        target = (first_block + row * BLOCKS_OF_ROW).to(tl.int64)
        word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
        inside = word < CELL_WORDS
        found = tl.load(cells + part * part_stride + source * CELL_WORDS + word, mask=inside)
        tl.store(cells + part * part_stride + target * CELL_WORDS + word, found, mask=inside)


@triton.jit
def _write_guesses(
    guessed, contexts, row_slots, head_drafts, head_stride, COUNT: tl.constexpr, GUESSES: tl.constexpr
):  # fmt: skip
    """Write a row's HeadDraft, if it is guessed behind: for the text with the token that was sampled."""
    row = tl.program_id(0)
    context = tl.load(contexts + row)
    if context > 0:
        guess = tl.arange(0, GUESSES)
        target = head_drafts + tl.load(row_slots + row).to(tl.int64) * head_stride
        found = tl.load(guessed + row * COUNT + guess, mask=guess < COUNT)
        tl.store(target + _FIRST_GUESS + guess, found.to(tl.int32), mask=guess < COUNT)
        tl.store(target + _NUM_GUESSES, COUNT)
        tl.store(target + _TEXT_LENGTH, context + 1)
