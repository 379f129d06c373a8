# SPDX-License-Identifier: Apache-2.0
"""The tokens that the automata of constrained rows allow, found on the GPU after the model's last kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.launch import compile_kernel, launch

SOURCE = "sampler/constrain.cu"
FIND_PLACES, LIST_TOKENS = "blink::find_places", "blink::list_allowed_tokens"
_WARP, _LIST_THREADS = 32, 512  # csrc/kernels/sampler/constrain.cu's kWarp and kListThreads
_SHARED_BYTES = 56 << 10  # of a block: room for most automata, and for three blocks on an SM
# Blocks that list tokens: as many as keep a GPU busy if all rows need a new list, and divide the work if one does.
_MAX_BLOCKS, _MIN_ROW_BLOCKS, _MAX_ROW_BLOCKS = 2048, 16, 128


class Allowed(NamedTuple):
    """What constrained rows may sample."""

    bits: Tensor  # int32 [num_slots * lists, ceil(vocab / 32)]; the slots' lists
    lists: Tensor  # int32 [rows]; the row's list in `bits`, -1 for unconstrained rows and where nothing is allowed
    may_end: Tensor  # int32 [rows]; whether the text may end here, 0 for unconstrained rows


def find_allowed(batch: Batch, num_rows: int, vocab_size: int) -> Allowed:
    """Return what the rows may sample; the rows' slots move on by their last tokens."""
    words, num_lists, (num_slots, list_words) = -(-vocab_size // 32), batch.num_lists, batch.token_bitmasks.shape
    assert batch.automata.shape[0] == 0 or list_words == num_lists * words
    device = batch.params.device
    lists, may_end, new_places = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(3))
    bits = batch.token_bitmasks.view(num_slots * num_lists, list_words // num_lists)
    allowed = Allowed(bits, lists, may_end)
    arguments = args(
        "ConstrainArgs",
        header=batch.header,
        row_slots=batch.row_slots,
        context_lens=batch.context_lens,
        params=batch.params,
        tokens=batch.tokens,
        stop_tokens=batch.stop_tokens,
        automata=batch.automata,
        places=batch.automaton_places,
        token_starts=batch.token_starts,
        token_text=batch.token_text,
        bits=bits,
        lists=lists,
        may_end=may_end,
        new_places=new_places,
        max_model_len=batch.tokens.stride(0),
        vocab_size=min(vocab_size, batch.token_starts.shape[0] - 1),
        words=words,
        num_lists=num_lists,
        shared_bytes=_SHARED_BYTES,
    )
    row_blocks = min(max(_MAX_BLOCKS // num_rows, _MIN_ROW_BLOCKS), _MAX_ROW_BLOCKS)
    find, list_tokens = compile_kernel(FIND_PLACES, SOURCE), compile_kernel(LIST_TOKENS, SOURCE)
    grid, early = (row_blocks, num_rows), has_clusters()
    launch(find, (num_rows, 1), _WARP, arguments, pdl=early)
    launch(list_tokens, grid, _LIST_THREADS, arguments, shared_bytes=_SHARED_BYTES, pdl=early)
    return allowed


def allow_all(batch: Batch, num_rows: int) -> Allowed:
    """Return that rows may sample any token; no slot moves on."""
    lists, may_end = batch.row_slots.new_full((num_rows,), -1), batch.row_slots.new_zeros(num_rows)
    return Allowed(batch.token_bitmasks, lists, may_end)
