# SPDX-License-Identifier: Apache-2.0
"""Batches, caches and a plain reference of latent attention: each head's keys and values are made of the latents."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attention_batch import Rows, make_attention_batch
from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.operands import UNSCALED, Expansion, KvScales, LatentSizes

BLOCK_SIZE, MAX_LEN, NUM_BLOCKS = 16, 512, 40

DECODE: Rows = [(1, 1), (1, 15), (1, 16), (1, 70), (1, 150)]
MIXED: Rows = [(1, 40), (1, 110), (7, 7), (9, 60), (2, 16)]


def make_latent_batch(rows: Rows, *, max_tokens: int, max_rows: int) -> Batch:
    """Return a batch on shuffled blocks; what no row has points nowhere."""
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_len": MAX_LEN}
    return make_attention_batch(rows, **sizes, max_tokens=max_tokens, max_rows=max_rows)


def draw_expansion(sizes: LatentSizes, nope: int, value: int) -> Expansion:
    norm = torch.rand(sizes.rank) + 0.5
    return Expansion(
        norm,
        torch.randn(sizes.heads, nope, sizes.rank) / sizes.rank**0.5,
        torch.randn(sizes.heads, value, sizes.rank) / sizes.rank**0.5,
    )


def join(expansion: Expansion, device: torch.device, dtype: torch.dtype) -> Expansion:
    """Return one whose keys and values of a head lie side by side, as a checkpoint has them."""
    keys, values = expansion.keys, expansion.values
    joined = torch.cat((keys, values), dim=1).to(device, dtype)
    return Expansion(expansion.norm.to(device, dtype), *joined.split([keys.shape[1], values.shape[1]], dim=1))


def find_slots(batch: Batch, rows: Rows) -> Tensor:
    """Return the slot of each token of a step [tokens]."""
    found = [torch.empty(0, dtype=torch.int32)]
    for row, (count, length) in enumerate(rows):
        blocks, places = find_cells(batch, row, length)
        found.append((blocks * BLOCK_SIZE + places)[length - count :].int())
    return torch.cat(found)


def find_cells(batch: Batch, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the block of each of a row's tokens, and the place in it."""
    places = torch.arange(length)
    return batch.block_tables[batch.row_slots[row], places // BLOCK_SIZE], places % BLOCK_SIZE


def make_cells(
    batch: Batch, rows: Rows, sizes: LatentSizes, dtype: torch.dtype, scales: KvScales = UNSCALED
) -> tuple[Tensor, Tensor]:
    """Return random numbers for each cell, float32, and a cache of them that holds NaN wherever no row has a token."""
    cells = torch.randn(NUM_BLOCKS, BLOCK_SIZE, sizes.rank + sizes.rope)
    stored = (cells / scales.key).to(dtype)
    poisoned = torch.full(stored.shape, torch.nan).to(dtype)
    whole = stored.float()
    held = poisoned.float()
    for row, (_, length) in enumerate(rows):
        at = find_cells(batch, row, length)
        held[at] = whole[at]
    held = held.to(dtype) if dtype != FP8 else held.to(FP8)
    return whole * scales.key, held[None, :, :, None].contiguous()


def attend_expanded(
    query: Tensor, batch: Batch, rows: Rows, cells: Tensor, expansion: Expansion, scale: float
) -> Tensor:
    """Return causal attention of each row [tokens, heads * value]; query: float32 [tokens, heads, nope + rope]."""
    found: list[Tensor] = []
    for row, (count, length) in enumerate(rows):
        kept = cells[find_cells(batch, row, length)]
        latents, turned = kept[:, : expansion.rank], kept[:, expansion.rank :]
        keys = torch.einsum("kr,hnr->hkn", latents, expansion.keys)
        keys = torch.cat((keys, turned.expand(len(keys), -1, -1)), dim=2)
        values = torch.einsum("kr,hvr->hkv", latents, expansion.values)
        start = int(batch.query_starts[row])
        scores = torch.einsum("qhd,hkd->hqk", query[start : start + count], keys) * scale
        hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append((weights @ values).transpose(0, 1).flatten(1))
    return torch.cat(found)


def move(batch: Batch, device: torch.device) -> Batch:
    return Batch(**{field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)})
