# SPDX-License-Identifier: Apache-2.0
"""How GEMMs of decoding rows are split among blocks: measured for GPUs and shapes in tuned.json, which
benchmarks/kernels/tune_decode.py writes, and by a rule for others. GPUs like a measured one take its configs."""

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
TABLE = Path(__file__).with_name("tuned.json")
REUSE_BYTES = 8192  # of sums, from which on these take the pipeline's place
_ROWS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)  # that there are kernels for
_PLAIN_ROWS = (24, 48)  # of them, those that weights of 16 bits alone have
_MEASURED_AS = {24: 32, 48: 64, 80: 96, 112: 128}  # where there is no own measurement
_WIDE = 64  # rows: of more, activations are more bytes than the weights of a group
_SM_BYTES = 228 << 10
_RESERVED_BYTES = 1024  # of a block's shared memory


class Output(Enum):
    """What becomes of a GEMM: csrc/kernels/common/ptx.cuh's Output."""

    STORE = "blink::Output::kStore"
    ADD = "blink::Output::kAdd"
    GATE = "blink::Output::kGate"


def parts_bytes(tokens: int, tile: int) -> int:
    """Return the size of csrc/kernels/gemm/epilogue.cuh's Parts; tile: weight rows of a block."""
    return tokens // 8 * (tile // 16) * 33 * 16


def can_share(output: Output, tile: int, cluster: int) -> bool:
    """Tell whether blocks of a cluster can divide a tile's outputs: Parts holds them in sixteens, and of ADD a block
    writes 64 at most."""
    share = tile // (2 if output is Output.GATE else 1) // cluster
    return share % 16 == 0 and (output is not Output.ADD or share <= 64)


def shared_bytes_of(blocks: float) -> int:
    """Return the shared memory that each block may take if an SM is to hold so many."""
    return int(_SM_BYTES / blocks) - _RESERVED_BYTES


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """See csrc/kernels/gemm/gemm.cuh."""

    groups: int  # of 64 weight rows
    cluster: int  # blocks that share k
    stage_k: int
    stages: int

    @property
    def tile(self) -> int:
        """Weight rows of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and a warp each that copies and sums squares."""
        return 128 * self.groups + 64

    def shared_bytes(self, output: Output, tokens: int) -> int:
        """Return the size of GemmShared."""
        pipeline = self.stages * (self.tile + tokens) * self.stage_k * 2
        halves = 2 if output is Output.GATE else 1
        parts = parts_bytes(tokens, self.tile)
        assert halves * (self.tile // halves // self.cluster) == self.tile // self.cluster
        own = 16 if parts > REUSE_BYTES else parts
        size = pipeline + own + self.cluster * tokens * 4 + self.stages * 16 + 8
        return -(-size // 1024) * 1024

    def fits(self, output: Output, tokens: int) -> bool:
        """Tell whether there is such a kernel."""
        if not can_share(output, self.tile, self.cluster) or self.groups > (2 if tokens <= _WIDE else 4):
            return False
        parts = parts_bytes(tokens, self.tile)
        pipeline = self.stages * (self.tile + tokens) * self.stage_k * 2
        return (parts <= REUSE_BYTES or pipeline >= parts) and self.shared_bytes(output, tokens) <= shared_bytes_of(1)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """See csrc/kernels/attention/attention.cuh."""

    cluster: int  # blocks that share the keys of one row and KV head
    warps: int  # of each block, that share its keys
    stages: int  # tiles of a warp

    def halve_tiles(self) -> AttentionConfig:
        """Return the tile config of a cache of half the bytes: as many are under way."""
        return replace(self, stages=2 * self.stages)

    def shared_bytes(self, group: int, head_dim: int, itemsize: int = 2) -> int:
        """Return the size of AttentionShared, at most; itemsize: of the cache."""
        tiles = self.warps * self.stages * TILE_KEYS * head_dim * 2 * itemsize
        heads = group * (head_dim + 32) * 2 + 4 * head_dim + group * head_dim * 4
        size = tiles + heads + (8 * group + 4) * (self.warps + self.cluster) + 8 * self.warps * self.stages + 72
        return -(-size // 1024) * 1024


def bucket_rows(rows: int, *, plain: bool = False) -> int:
    """Return the rows that a kernel computes for so many, 128 at most.

    plain: of weights of 16 bits. All GEMMs of a step pad alike: what one hands on the next reads.
    """
    return next(size for size in _ROWS if rows <= size and (plain or size not in _PLAIN_ROWS))


def list_gemm_configs(output: Output, tokens: int) -> Iterator[GemmConfig]:
    """Yield the configs that are worth a measurement."""
    if tokens > _WIDE:
        yield from _list_wide_configs(output, tokens)
        return
    for groups, blocks, units, cluster in itertools.product((1, 2), (1, 2, 3, 4), (2, 4), (1, 2, 4)):
        config = _fill(output, tokens, groups, cluster, units * 64 // groups, blocks)
        if config is not None:
            yield config


def _list_wide_configs(output: Output, tokens: int) -> Iterator[GemmConfig]:
    for groups, blocks, stage_k, cluster in itertools.product((1, 2, 4), (1, 2), (64, 128), (1, 2, 4)):
        # Of clusters of four blocks that fill an SM each, the last may find no place beside the resident
        # scheduler, and take as long as all others.
        if blocks > (1 if groups == 4 else 2) or (blocks == 1 and cluster == 4):
            continue
        config = _fill(output, tokens, groups, cluster, stage_k, blocks)
        if config is not None:
            yield config


def _fill(output: Output, tokens: int, groups: int, cluster: int, stage_k: int, blocks: int) -> GemmConfig | None:
    """Return the tile config with as many stages as let so many blocks fit an SM; None if too few do."""
    budget = shared_bytes_of(blocks)
    stages = budget // ((64 * groups + tokens) * stage_k * 2)
    while stages > 1:
        config = GemmConfig(groups, cluster, stage_k, stages)
        if config.shared_bytes(output, tokens) <= budget:
            return config if config.fits(output, tokens) else None
        stages -= 1
    return None


def refill_gemm(config: GemmConfig, output: Output, of_tokens: int, tokens: int) -> GemmConfig | None:
    """Return a tile config of so many tokens for other tokens, with other stages; None: there is none.

    An SM holds as many blocks, if they fit.
    """
    if tokens == of_tokens:
        return config if config.fits(output, tokens) else None
    most = _SM_BYTES // (config.shared_bytes(output, of_tokens) + _RESERVED_BYTES)
    options = (
        _fill(output, tokens, config.groups, config.cluster, config.stage_k, blocks) for blocks in range(most, 0, -1)
    )
    return next((found for found in options if found is not None), None)


def list_attention_configs(group: int, head_dim: int) -> Iterator[AttentionConfig]:
    """Yield the configs that are worth a measurement."""
    for config in itertools.starmap(AttentionConfig, itertools.product((1, 2, 4, 8), (2, 3, 4, 8), (1, 2, 3))):
        if config.cluster * config.warps <= 64 and config.shared_bytes(group, head_dim) <= _SM_BYTES // 2:
            yield config


def choose_gemm_config(output: Output, tokens: int, n: int, k: int) -> GemmConfig:
    """Return the tile config of a GEMM of so many rows, rounded up, with a weight [n, k]."""
    return _find_gemm_config(output, tokens, n, k) or _guess_gemm_config(output, tokens, n)


def is_measured(output: Output, tokens: int, n: int, k: int) -> bool:
    """Tell whether the tile config of such a GEMM was measured."""
    return _find_gemm_config(output, tokens, n, k) is not None


def _find_gemm_config(output: Output, tokens: int, n: int, k: int) -> GemmConfig | None:
    for measured in (tokens, _MEASURED_AS.get(tokens, tokens)):
        found = read_table().get(gemm_key(output, measured, n, k))
        if found and GemmConfig(*found).fits(output, tokens):
            return GemmConfig(*found)
    return None


def _guess_gemm_config(output: Output, tokens: int, n: int) -> GemmConfig:
    """Return a tile config like those that were the fastest for most shapes on an H200."""
    processors = device.count_processors()
    if tokens > _WIDE:
        return _guess_wide_config(output, tokens, n, processors)
    stage_k = 256 if tokens <= 16 else 128
    if output is Output.ADD:
        return _guess_add_config(tokens, n, stage_k, processors)
    is_wide = n / 64 / processors > 3
    groups, cluster = 2 if is_wide and tokens > 32 else 1, 1 if is_wide else 2
    config = _fill(output, tokens, groups, cluster, stage_k, blocks=2)
    assert config is not None
    return config


def _guess_wide_config(output: Output, tokens: int, n: int, processors: int) -> GemmConfig:
    """Return a tile config whose groups share the activations."""
    is_wide = output is not Output.ADD and n / 64 / processors > 3
    groups, blocks = (4, 1) if is_wide else (2, 2)
    config = _fill(output, tokens, groups, 1 if is_wide else _choose_cluster(n / 128 / processors), 64, blocks)
    assert config is not None
    return config


def _choose_cluster(tiles: float) -> int:
    """Return the number of blocks that share k which leaves the least idle; tiles: of each SM."""
    return min((2, 4), key=lambda cluster: math.ceil(tiles * cluster) / (tiles * cluster))


def _guess_add_config(tokens: int, n: int, stage_k: int, processors: int) -> GemmConfig:
    """Return the tile config that leaves the least idle of the SMs that have fewer blocks than others."""
    tiles = n / 64 / processors
    cluster = _choose_cluster(tiles)
    most = min(math.ceil(tiles * cluster), 3)
    options = itertools.product(range(most, 0, -1), (stage_k, 128))
    fitting = (_fill(Output.ADD, tokens, 1, cluster, size, blocks) for blocks, size in options)
    return next(config for config in fitting if config is not None)


def choose_attention_config(heads: int, group: int) -> AttentionConfig:
    """Return the tile config of attention; heads: KV heads of all rows together, each with a group of query heads."""
    table = read_table()
    found = table.get(attention_key(heads, group), table.get(attention_key(heads)))
    return AttentionConfig(*found) if found else _guess_attention_config(heads)


def _guess_attention_config(heads: int) -> AttentionConfig:
    if heads <= 16:
        return AttentionConfig(4, 4, 3)
    if heads <= 64:
        return AttentionConfig(2, 4, 2)
    if heads <= 128:
        return AttentionConfig(2, 8, 1)
    return AttentionConfig(1, 4, 3) if heads <= 384 else AttentionConfig(1, 4, 2)


def name_origin(*, measured: bool) -> str:
    """Return where a tile config comes from, in words."""
    return "tuned" if measured else "by rule"


def gemm_key(output: Output, tokens: int, n: int, k: int) -> str:
    """Return a GEMM's key in the table."""
    return f"{output.name.lower()} {tokens} x {k} x {n}"


def attention_key(heads: int, group: int | None = None) -> str:
    """Return the key in the table of attention of so many KV heads of all rows; None: of any group of query heads."""
    return f"attend {heads}" + (f" x {group}" if group else "")


def describe_gpu() -> dict[str, Any]:
    """Return what the table says of a GPU: those of which it says the same have their measurements in common."""
    return {"SMs": device.count_processors(), "compute_capability": list(device.capability())}


@device.cached
def read_table() -> dict[str, list[int]]:
    """Return what was measured for the current GPU, or else for one like it: numbers of a config, by keys."""
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    gpu = describe_gpu()
    alike = (table for table in tables.values() if table["gpu"] == gpu)
    table = tables.get(device.gpu_name()) or next(alike, None)
    return table["configs"] if table else {}
