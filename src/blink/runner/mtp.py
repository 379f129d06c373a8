# SPDX-License-Identifier: Apache-2.0
"""Run a model's layer that predicts one token further, on the CPU: a model of one layer, run as any other.

An entry of its cache at position p is made of the model's hidden state at p and of the token at p + 1, as a draft
head's. For each further guess it reads its own hidden state in place of the model's. Guesses are written to a copy of
the rows' blocks. Nothing that it computes decides on a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import plain, take_rows
from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch, Header
from blink.kernels.cpu.guesses import CpuGuesses
from blink.kernels.layer_cache import KvCache, LayerCache
from blink.kernels.rms_norm import rms_norm
from blink.models.decoder import Decoder
from blink.models.mtp import MtpHead
from blink.plan.site import Bucket
from blink.runner.matmul import linear
from blink.runner.run import Runner


class MtpDrafter:
    """The Drafter of such a layer."""

    reads_end = True

    def __init__(self, model: Decoder, head: MtpHead, num_drafts: int) -> None:
        """Draft so many tokens behind each sample."""
        self._model, self._head, self._num_drafts = model, head, num_drafts
        self._end = model.spec.num_layers
        self._runner = Runner(
            Decoder(head.spec, model.embedding, [head.layer], head.norm, model.lm_head, model.kv_dtype)
        )
        self._kept: dict[int, Tensor] = {}  # by batch

    def reserve(self, batch: Batch, residual: Tensor) -> None:
        """Do nothing: what it keeps is read when the last layer has run."""

    def keep(self, batch: Batch, layer: int, residual: Tensor) -> None:
        """Keep the norm of the residual [tokens, hidden] that the model's last layer ends with."""
        if layer == self._end:
            normed = rms_norm(residual, plain(self._model.norm), self._model.spec.rms_norm_eps)
            self._kept[batch.header.data_ptr()] = normed

    def read(self, batch: Batch, cache: LayerCache, size: Bucket) -> None:
        """Read a step whose rows are sampled, and write batch.head_drafts; cache: the layer's of the KV cache."""
        hidden = self._kept.pop(batch.header.data_ptr())
        sizes = size.tokens, size.rows
        rows = CpuGuesses(batch, sizes, self._num_drafts, self._head.attention, hidden.dtype)
        hidden = self._run(batch, cache, size.rows, rows.next_ids, hidden)
        if len(rows.ends):
            rows.write(self._guess(batch, cache, rows, hidden.index_select(0, rows.ends)))

    def _guess(self, batch: Batch, cache: LayerCache, rows: CpuGuesses, hidden: Tensor) -> Tensor:
        """Return the guessed tokens [rows, num_drafts]; hidden: what the layer made of each row's last token."""
        found = [rows.sample(0, linear(hidden, self._model.lm_head))]
        if self._num_drafts > 1:
            own, copied = copy_rows(batch, cache, rows, self._num_drafts)
            for step in range(1, self._num_drafts):
                write_positions(own, rows.positions(step), cache.block_size, self._model.spec.max_model_len)
                hidden = self._run(own, copied, len(found[-1]), found[-1], hidden)
                found.append(rows.sample(step, linear(hidden, self._model.lm_head)))
        return torch.stack(found, dim=1)

    def _run(self, batch: Batch, cache: LayerCache, num_rows: int, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's hidden states [tokens, hidden] of those before it, and of the tokens behind them."""
        head, eps = self._head, self._model.spec.rms_norm_eps
        embeddings = take_rows(self._model.embedding, ids.to(torch.int32)).to(hidden.dtype)
        pair = rms_norm(embeddings, head.embedding_norm, eps), rms_norm(hidden, head.hidden_norm, eps)
        residual = linear(torch.cat(pair, dim=1), head.fusion)
        return self._runner.run_layers(batch, KvCache({0: cache}), num_rows, residual)


def copy_rows(batch: Batch, cache: LayerCache, rows: CpuGuesses, num_drafts: int) -> tuple[Batch, LayerCache]:
    """Return a batch of rows of one token, and a copy of their blocks with room for guesses."""
    positions = rows.positions(0)
    num_rows, size = len(positions), cache.block_size
    used = int(positions.max()) // size + 1
    width = (int(positions.max()) + num_drafts) // size + 1
    own = Batch.allocate(max_tokens=num_rows, max_rows=num_rows, num_slots=num_rows, max_blocks=width, max_model_len=1)
    own.header[[Header.NUM_ROWS, Header.NUM_TOKENS, Header.NUM_DECODE_ROWS]] = num_rows
    own.block_tables.copy_(torch.arange(num_rows * width).view(num_rows, width))
    own.row_slots.copy_(torch.arange(num_rows))
    own.query_starts.copy_(torch.arange(num_rows + 1))
    kept = cache.cells.view(torch.uint8) if cache.dtype == FP8 else cache.cells
    cells = kept.new_zeros(kept.shape[0], num_rows, width, *kept.shape[2:])
    table = batch.block_tables[rows.slots, :used].long()
    held = torch.arange(used) <= (positions // size)[:, None]  # others are not the row's
    cells[:, :, :used][:, held] = kept[:, table[held]]
    return own, LayerCache(cells.flatten(1, 2).view(cache.dtype))


def write_positions(batch: Batch, positions: Tensor, block_size: int, longest: int) -> None:
    """Say where each row's one token stands in its text; beyond the longest text nobody takes a draft."""
    batch.positions.copy_(positions.clamp(max=longest - 1))
    batch.context_lens.copy_(positions + 1)
    blocks = batch.block_tables.gather(1, (positions // block_size)[:, None])[:, 0]
    batch.kv_slots.copy_(blocks * block_size + positions % block_size)
