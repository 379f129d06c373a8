# SPDX-License-Identifier: Apache-2.0
"""How products of decoding rows are split among blocks: measured for GPUs and shapes in splits.json, which
benchmarks/kernels/tune_decode.py writes, and by a rule for others. GPUs like a measured one take its splits."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from blink.kernels.gpu import device

TILE_KEYS = 16  # that a warp of attention takes at once
TABLE = Path(__file__).with_suffix(".json")
REUSE_BYTES = 8192  # of sums, from which on these take the ring's place
_ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)  # that there are kernels for
_FINE_ROWS = (24, 48)  # of them, those that weights of 16 bits alone have
_MEASURED_AS = {24: 32, 48: 64, 80: 96, 112: 128}  # where there is no own measurement
_WIDE = 64  # rows: of more, activations are more bytes than the weights of a group
_SM_BYTES = 228 << 10
_RESERVED_BYTES = 1024  # of a block's shared memory


class Output(Enum):
    """What becomes of a product: csrc/gpu/decode/ptx.cuh's Output."""

    STORE = "blink::Output::kStore"
    ADD = "blink::Output::kAdd"
    GATE = "blink::Output::kGate"


def parts_bytes(tokens: int, tile: int) -> int:
    """Return the size of csrc/gpu/decode/output.cuh's Parts; tile: weight rows of a block."""
    return tokens // 8 * (tile // 16) * 33 * 16


def can_share(output: Output, tile: int, cluster: int) -> bool:
    """Tell whether blocks of a cluster can divide a tile's outputs: Parts holds them in sixteens, and of ADD a block
    writes 64 at most."""
    share = tile // (2 if output is Output.GATE else 1) // cluster
    return share % 16 == 0 and (output is not Output.ADD or share <= 64)


def shared_bytes_of(blocks: float) -> int:
    """Return the shared memory that each block may take if a multiprocessor is to hold so many."""
    return int(_SM_BYTES / blocks) - _RESERVED_BYTES


@dataclass(frozen=True, slots=True)
class GemmSplit:
    """See csrc/gpu/decode/gemm.cuh."""

    groups: int  # of 64 weight rows
    cluster: int  # blocks that share k
    stage_k: int
    stages: int

    @property
    def tile(self) -> int:
        """Weight rows of a block."""
        return 64 * self.groups

    def shared_bytes(self, output: Output, tokens: int) -> int:
        """Return the size of GemmShared."""
        ring = self.stages * (self.tile + tokens) * self.stage_k * 2
        halves = 2 if output is Output.GATE else 1
        parts = parts_bytes(tokens, self.tile)
        assert halves * (self.tile // halves // self.cluster) == self.tile // self.cluster
        own = 16 if parts > REUSE_BYTES else parts
        size = ring + own + self.cluster * tokens * 4 + self.stages * 16 + 8
        return -(-size // 1024) * 1024

    def fits(self, output: Output, tokens: int) -> bool:
        """Tell whether there is such a kernel."""
        if not can_share(output, self.tile, self.cluster) or self.groups > (2 if tokens <= _WIDE else 4):
            return False
        parts = parts_bytes(tokens, self.tile)
        ring = self.stages * (self.tile + tokens) * self.stage_k * 2
        return (parts <= REUSE_BYTES or ring >= parts) and self.shared_bytes(output, tokens) <= shared_bytes_of(1)


@dataclass(frozen=True, slots=True)
class AttentionSplit:
    """See csrc/gpu/decode/attention.cuh."""

    cluster: int  # blocks that share the keys of one row and KV head
    warps: int  # of each block, that share its keys
    stages: int  # tiles of a warp

    def halve_tiles(self) -> AttentionSplit:
        """Return the split of a cache of half the bytes: as many are under way."""
        return replace(self, stages=2 * self.stages)

    def shared_bytes(self, group: int, head_dim: int, itemsize: int = 2) -> int:
        """Return the size of AttentionShared, at most; itemsize: of the cache."""
        tiles = self.warps * self.stages * TILE_KEYS * head_dim * 2 * itemsize
        heads = group * (head_dim + 32) * 2 + 4 * head_dim + group * head_dim * 4
        size = tiles + heads + (8 * group + 4) * (self.warps + self.cluster) + 8 * self.warps * self.stages + 72
        return -(-size // 1024) * 1024


def pad_rows(rows: int, *, fine: bool = False) -> int:
    """Return the rows that a kernel computes for so many, 128 at most.

    fine: of weights of 16 bits. All products of a step pad alike: what one hands on the next reads.
    """
    return next(size for size in _ROWS if rows <= size and (fine or size not in _FINE_ROWS))


def list_gemm_splits(output: Output, tokens: int) -> Iterator[GemmSplit]:
    """Yield the splits that are worth a measurement."""
    if tokens > _WIDE:
        yield from _list_wide_splits(output, tokens)
        return
    for groups, blocks, units, cluster in itertools.product((1, 2), (1, 2, 3, 4), (2, 4), (1, 2, 4)):
        split = _fill(output, tokens, groups, cluster, units * 64 // groups, blocks)
        if split is not None:
            yield split


def _list_wide_splits(output: Output, tokens: int) -> Iterator[GemmSplit]:
    for groups, blocks, stage_k, cluster in itertools.product((1, 2, 4), (1, 2), (64, 128), (1, 2, 4)):
        # Of clusters of four blocks that fill a multiprocessor each, the last may find no place beside the resident
        # scheduler, and take as long as all others.
        if blocks > (1 if groups == 4 else 2) or (blocks == 1 and cluster == 4):
            continue
        split = _fill(output, tokens, groups, cluster, stage_k, blocks)
        if split is not None:
            yield split


def _fill(output: Output, tokens: int, groups: int, cluster: int, stage_k: int, blocks: int) -> GemmSplit | None:
    """Return the split with as many stages as let so many blocks fit a multiprocessor; None if too few do."""
    budget = shared_bytes_of(blocks)
    stages = budget // ((64 * groups + tokens) * stage_k * 2)
    while stages > 1:
        split = GemmSplit(groups, cluster, stage_k, stages)
        if split.shared_bytes(output, tokens) <= budget:
            return split if split.fits(output, tokens) else None
        stages -= 1
    return None


def list_attention_splits(group: int, head_dim: int) -> Iterator[AttentionSplit]:
    """Yield the splits that are worth a measurement."""
    for split in itertools.starmap(AttentionSplit, itertools.product((1, 2, 4, 8), (2, 3, 4, 8), (1, 2, 3))):
        if split.cluster * split.warps <= 64 and split.shared_bytes(group, head_dim) <= _SM_BYTES // 2:
            yield split


def choose_gemm_split(output: Output, tokens: int, n: int, k: int) -> GemmSplit:
    """Return the split of a product of so many rows, rounded up, with a weight [n, k]."""
    return _find_gemm_split(output, tokens, n, k) or _guess_gemm_split(output, tokens, n)


def is_measured(output: Output, tokens: int, n: int, k: int) -> bool:
    """Tell whether the split of such a product was measured."""
    return _find_gemm_split(output, tokens, n, k) is not None


def _find_gemm_split(output: Output, tokens: int, n: int, k: int) -> GemmSplit | None:
    for measured in (tokens, _MEASURED_AS.get(tokens, tokens)):
        found = read_table().get(gemm_key(output, measured, n, k))
        if found and GemmSplit(*found).fits(output, tokens):
            return GemmSplit(*found)
    return None


def _guess_gemm_split(output: Output, tokens: int, n: int) -> GemmSplit:
    """Return a split like those that were the fastest for most shapes on an H200."""
    processors = device.count_processors()
    if tokens > _WIDE:
        return _guess_wide_split(output, tokens, n, processors)
    stage_k = 256 if tokens <= 16 else 128
    if output is Output.ADD:
        return _guess_add_split(tokens, n, stage_k, processors)
    is_wide = n / 64 / processors > 3
    groups, cluster = 2 if is_wide and tokens > 32 else 1, 1 if is_wide else 2
    split = _fill(output, tokens, groups, cluster, stage_k, blocks=2)
    assert split is not None
    return split


def _guess_wide_split(output: Output, tokens: int, n: int, processors: int) -> GemmSplit:
    """Return a split whose groups share the activations."""
    is_wide = output is not Output.ADD and n / 64 / processors > 3
    groups, blocks = (4, 1) if is_wide else (2, 2)
    split = _fill(output, tokens, groups, 1 if is_wide else _choose_cluster(n / 128 / processors), 64, blocks)
    assert split is not None
    return split


def _choose_cluster(tiles: float) -> int:
    """Return the number of blocks that share k which leaves the least idle; tiles: of each multiprocessor."""
    return min((2, 4), key=lambda cluster: math.ceil(tiles * cluster) / (tiles * cluster))


def _guess_add_split(tokens: int, n: int, stage_k: int, processors: int) -> GemmSplit:
    """Return the split that leaves the least idle of the multiprocessors that have fewer blocks than others."""
    tiles = n / 64 / processors
    cluster = _choose_cluster(tiles)
    most = min(math.ceil(tiles * cluster), 3)
    options = itertools.product(range(most, 0, -1), (stage_k, 128))
    fitting = (_fill(Output.ADD, tokens, 1, cluster, size, blocks) for blocks, size in options)
    return next(split for split in fitting if split is not None)


def choose_attention_split(heads: int, group: int) -> AttentionSplit:
    """Return the split of attention of so many KV heads of all rows together, each with a group of query heads."""
    table = read_table()
    found = table.get(attention_key(heads, group), table.get(attention_key(heads)))
    return AttentionSplit(*found) if found else _guess_attention_split(heads)


def _guess_attention_split(heads: int) -> AttentionSplit:
    if heads <= 16:
        return AttentionSplit(4, 4, 3)
    if heads <= 64:
        return AttentionSplit(2, 4, 2)
    if heads <= 128:
        return AttentionSplit(2, 8, 1)
    return AttentionSplit(1, 4, 3) if heads <= 384 else AttentionSplit(1, 4, 2)


def name_origin(*, measured: bool) -> str:
    """Return where a split comes from, in words."""
    return "tuned" if measured else "by rule"


def gemm_key(output: Output, tokens: int, n: int, k: int) -> str:
    """Return a product's key in the table."""
    return f"{output.name.lower()} {tokens} x {k} x {n}"


def attention_key(heads: int, group: int | None = None) -> str:
    """Return the key in the table of attention of so many KV heads of all rows; None: of any group of query heads."""
    return f"attend {heads}" + (f" x {group}" if group else "")


def describe_gpu() -> dict[str, Any]:
    """Return what the table says of a GPU: those of which it says the same have their measurements in common."""
    return {"multiprocessors": device.count_processors(), "compute_capability": list(device.capability())}


@device.cached
def read_table() -> dict[str, list[int]]:
    """Return what was measured for the current GPU, or else for one like it: numbers of a split, by keys."""
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    gpu = describe_gpu()
    alike = (table for table in tables.values() if table["gpu"] == gpu)
    table = tables.get(device.gpu_name()) or next(alike, None)
    return table["splits"] if table else {}
