# SPDX-License-Identifier: Apache-2.0
"""Batches for kernels of attention."""

from __future__ import annotations

import random

import torch

from blink.kernels.batch import Batch, Header

Rows = list[tuple[int, int]]  # queries and context of each


def make_attention_batch(
    rows: Rows, *, block_size: int, num_blocks: int, max_len: int, max_tokens: int, max_rows: int
) -> Batch:
    """Return a CPU batch on shuffled blocks of so many; what no row has points nowhere."""
    batch = Batch.allocate(
        max_tokens=max_tokens,
        max_rows=max_rows,
        num_slots=16,
        max_blocks=max_len // block_size,
        max_model_len=max_len,
    )
    batch.block_tables.fill_(10**8)
    batch.row_slots.fill_(10**8)
    batch.context_lens.fill_(10**8)
    blocks = random.Random(3).sample(range(num_blocks), num_blocks)
    slots = random.Random(4).sample(range(16), len(rows))
    batch.query_starts.fill_(sum(count for count, _ in rows))
    batch.query_starts[0] = 0
    for row, (count, length) in enumerate(rows):
        used = -(-length // block_size)
        batch.block_tables[slots[row], :used] = torch.tensor([blocks.pop() for _ in range(used)], dtype=torch.int32)
        batch.row_slots[row] = slots[row]
        batch.context_lens[row] = length
        batch.query_starts[row + 1] = batch.query_starts[row] + count
    batch.header[Header.NUM_ROWS] = len(rows)
    batch.header[Header.NUM_TOKENS] = batch.query_starts[len(rows)]
    batch.header[Header.NUM_DECODE_ROWS] = sum(count == 1 for count, _ in rows)
    return batch
