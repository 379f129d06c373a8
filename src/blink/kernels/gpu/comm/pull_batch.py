# SPDX-License-Identifier: Apache-2.0
"""Copies a step's batch from the memory of another GPU, where its scheduler is: csrc/kernels/comm/pull_batch.cu."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.batch import PARAM_WORDS, Batch
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.launch import compile_kernel, launch

_THREADS, _SPAN_BLOCKS = 256, 8


def pull_batch(
    source: Tensor,
    to: Tensor,
    spans: Tensor,
    batch: Batch,
    own: Batch,
    rows: int,
    block_size: int,
    param: int | None = None,
) -> None:
    """Enqueue the copy of a batch to this GPU, and of the tables of its rows' slots.

    source, to: all arrays of a state, uint8, which lie alike; spans: which words of them, int32 [spans, 2]: where one
    begins and how many it has. batch: the scheduler's, in `source`; own: this GPU's, in `to`. param: one of the
    slots' that is copied too.
    """
    kernel = compile_kernel(f"blink::pull_batch<{_THREADS}>", "comm/pull_batch.cu")
    has_windows = batch.has_windows
    arguments = args(
        "PullArgs",
        source=source,
        to=to,
        spans=spans,
        row_slots=batch.row_slots,
        context_lens=batch.context_lens,
        tables=batch.block_tables,
        own_tables=own.block_tables,
        window_tables=batch.window_tables if has_windows else None,
        own_window_tables=own.window_tables if has_windows else None,
        params=None if param is None else batch.params,
        own_params=None if param is None else own.params,
        num_spans=len(spans),
        max_blocks=batch.block_tables.shape[1],
        block_size=block_size,
        param_words=PARAM_WORDS,
        param=param or 0,
    )
    launch(kernel, (_SPAN_BLOCKS + rows, 1), _THREADS, arguments, pdl=False)
