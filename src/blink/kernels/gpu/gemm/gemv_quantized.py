# SPDX-License-Identifier: Apache-2.0
"""How GEMMs of a few rows with quantized weights are split: csrc/kernels/gemm/gemv_quantized.cuh, gemv_int4.cuh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blink.formats.layouts import Matrix
from blink.formats.schemes import GROUP, UNIT_BYTES, FormatId
from blink.kernels.gpu.device import cached, count_processors
from blink.kernels.gpu.gemm.tile_configs import Output, read_table, shared_bytes_of

# With which a lane's part of the activations takes 80 registers at most, or 64 where rows fill the instruction.
_MOST_STEPS = {FormatId.FP8: (5, 2), FormatId.INT4: (2, 0)}
_STAGE_BYTES = 8 << 10
_STAGE_BYTES_OF_ONE_ROW = 16 << 10
_INT4_STAGE_BYTES = 17 << 10
_INT4_PIPELINE_BYTES = 40 << 10  # which keep the memory busy
_MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class QuantizedGemvConfig:
    """How a GEMM is split: as gemv.TileConfig, with slices of a unit."""

    warps: int
    cluster: int
    slices: int
    tile: int
    stage_rows: int
    stages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What sets a GEMM apart, but for its output."""

    format: FormatId
    grouped: bool
    rows: int
    k: int
    n: int  # weight rows

    @classmethod
    def of(cls, matrix: Matrix, rows: int) -> Shape:
        """Describe the GEMM of so many rows with a packed weight."""
        assert matrix.encoding is not None
        return cls(matrix.encoding.format, matrix.encoding.grouped, rows, matrix.k, matrix.n)


def key(shape: Shape) -> str:
    """Return a GEMM's key in the table of measured configs."""
    return f"few {shape.format.name.lower()} {shape.rows} x {shape.k} x {shape.n}"


def choose_config(shape: Shape) -> QuantizedGemvConfig | None:
    """Return the tile config of a GEMM; None if there is none."""
    found = read_table().get(key(shape))
    return _leave_room_for_groups(shape, QuantizedGemvConfig(*found)) if found else _guess_config(shape)


def list_configs(shape: Shape) -> Iterator[QuantizedGemvConfig]:
    """Yield the configs of weights of 4 bits that are worth a measurement."""
    found: set[QuantizedGemvConfig] = set()
    for shares in itertools.product((1, 2), range(8, 3, -1), _list_slices(shape)[:3]):
        if _divides(shape, *shares):
            for config in _list_tiles(shape, *shares):
                if config not in found:
                    found.add(config)
                    yield config


def _list_tiles(shape: Shape, cluster: int, warps: int, slices: int) -> Iterator[QuantizedGemvConfig]:
    """Yield configs of one or two blocks for each SM, which leave room for the next kernel's or do not."""
    row_bytes = shape.k // shape.format.unit * UNIT_BYTES // cluster
    for waves, groups in itertools.product((1, 2), (1, 2, 4)):
        tile, stage_rows = _spread(shape, cluster, waves), groups * 8 // slices
        if tile % stage_rows or not _STAGE_BYTES // 2 < stage_rows * row_bytes <= _INT4_STAGE_BYTES:
            continue
        shares = QuantizedGemvConfig(warps, cluster, slices, tile, stage_rows, 0)
        for blocks in (2, 1.6, 1):
            config = _fill_stages(shape, shares, blocks * waves)
            if config is not None and config.stages > 1:
                yield config


def _spread(shape: Shape, cluster: int, waves: int) -> int:
    """Return the weight rows of a block if each SM is to have so many blocks."""
    processors = count_processors()
    return _round_up(math.ceil(shape.n * cluster / (processors * waves)), 16)


def _leave_room_for_groups(shape: Shape, config: QuantizedGemvConfig) -> QuantizedGemvConfig:
    """Return a config, FP8's measured without groups, with the stages that let as many blocks fit an SM."""
    measured = dataclasses.replace(shape, grouped=shape.format is FormatId.INT4)
    for blocks in range(_most_blocks(shape.format, config.warps), 0, -1):
        if shared_bytes(measured, config) <= shared_bytes_of(blocks):
            found = _fill_stages(shape, config, blocks)
            if found is not None:
                return dataclasses.replace(found, stages=min(found.stages, config.stages))
    return config


def list_warps(rows: int, usual: Iterable[int]) -> tuple[int, ...]:
    """Return how many warps a block may have: the usual counts, then for few rows 17, as 17,408 (Qwen3.6-27B) wants."""
    return (*usual, 17) if rows <= 2 else tuple(usual)


@cached
def _guess_config(shape: Shape) -> QuantizedGemvConfig | None:
    counts = list_warps(shape.rows, range(8, 0, -1)) if shape.format is FormatId.FP8 else range(8, 0, -1)
    options = itertools.product((1, 2, 4, 8), counts, _list_slices(shape))
    found = [option for option in options if _divides(shape, *option)]
    if not found:
        return None
    # Conversions want some warps, and each block of a cluster waits for the others.
    if shape.format is FormatId.INT4:
        return _fill_int4(shape, *min(found, key=functools.partial(_rank_int4, shape)))
    cluster, warps, slices = min(found, key=lambda option: (option[0], option[1] < 4, -option[2], -option[1]))
    return _fill(shape, warps, cluster, slices)


def _list_slices(shape: Shape) -> list[int]:
    """Return of how many units a load may be; the first are the fastest."""
    if shape.format is FormatId.INT4:  # whose kernel has half of the matrix instruction's rows
        return [slices for slices in (8, 4, 2, 1) if shape.rows * slices <= 8]
    return [slices for slices in (8, 4, 2, 1) if slices <= (8 if shape.rows <= 2 else 4 if shape.rows <= 4 else 2)]


def _most_blocks(format: FormatId, warps: int) -> int:
    """Return for how many blocks of an SM the kernel keeps registers."""
    if format is FormatId.INT4:
        return 6 if warps <= 2 else 4 if warps <= 4 else 2
    return 3 if warps <= 4 else 2


def _divides(shape: Shape, cluster: int, warps: int, slices: int) -> bool:
    steps, rest = divmod(shape.k, shape.format.unit * slices * warps * cluster)
    folded = shape.rows * slices <= 8
    return rest == 0 and 0 < steps <= _MOST_STEPS[shape.format][0 if folded else 1]


def _fill(shape: Shape, warps: int, cluster: int, slices: int) -> QuantizedGemvConfig | None:
    row_bytes = shape.k // shape.format.unit * UNIT_BYTES // cluster
    blocks = shape.n * cluster / 16 / count_processors()
    tile = 32 if blocks > 2 else 16
    stage_rows, most = 8 // slices, _STAGE_BYTES_OF_ONE_ROW if shape.rows == 1 else _STAGE_BYTES
    while stage_rows < 8 and 2 * stage_rows * row_bytes <= most:
        stage_rows *= 2
    return _fill_stages(
        shape, QuantizedGemvConfig(warps, cluster, slices, tile, stage_rows, 0), _most_blocks(shape.format, warps)
    )


def _rank_int4(shape: Shape, option: tuple[int, int, int]) -> tuple[bool, int, int, int]:
    """Rank the blocks of a cluster, warps and slices of a GEMM; of several rows, two steps take many registers."""
    cluster, warps, slices = option
    is_large = shape.k // (shape.format.unit * cluster * warps * slices) > 1 and shape.rows > 1
    return is_large, cluster, -warps, -slices


def _fill_int4(shape: Shape, cluster: int, warps: int, slices: int) -> QuantizedGemvConfig | None:
    """Return the tile config with a block for each SM, or as few as leave room for the next kernel's."""
    row_bytes = shape.k // shape.format.unit * UNIT_BYTES // cluster
    for waves in itertools.count(1):
        tile, stage_rows = _spread(shape, cluster, waves), min(16 // slices, 16)
        while tile % (2 * stage_rows) == 0 and 2 * stage_rows * row_bytes <= _INT4_STAGE_BYTES:
            stage_rows *= 2
        config = _fill_stages(shape, QuantizedGemvConfig(warps, cluster, slices, tile, stage_rows, 0), 2)
        if tile == 16 or (
            config is not None and config.stages * stage_rows * row_bytes >= min(_INT4_PIPELINE_BYTES, tile * row_bytes)
        ):
            return config
    return None


def _fill_stages(shape: Shape, config: QuantizedGemvConfig, blocks: float) -> QuantizedGemvConfig | None:
    """Return the tile config with as many stages as let so many blocks fit an SM; None if none does."""
    for stages in range(min(_MAX_STAGES, config.tile // config.stage_rows), 0, -1):
        filled = dataclasses.replace(config, stages=stages)
        if shared_bytes(shape, filled) <= shared_bytes_of(blocks):
            return filled
    return None


def shared_bytes(shape: Shape, config: QuantizedGemvConfig) -> int:
    """Return the size of QuantizedGemvShared or Int4GemvShared."""
    is_int4, block_k = shape.format is FormatId.INT4, shape.k // config.cluster
    pad = 64 if not is_int4 else 16 if config.cluster > 1 else 0
    pitch = block_k // shape.format.unit * UNIT_BYTES + (pad if config.slices < 8 else 0)
    pipeline = config.stages * config.stage_rows * pitch
    sums = config.warps * config.slices * shape.rows * (config.tile + 1) + config.warps * shape.rows
    exchanged = config.cluster * shape.rows * (config.tile // config.cluster + 1) + config.cluster * shape.rows
    base = _round_up(_round_up(_round_up(pipeline, 128) + (sums + exchanged) * 4, 8) + 16 * config.stages + 8, 128)
    groups = config.tile * (block_k // GROUP) if shape.grouped else 1
    size = _round_up(base + groups * 4, 128)
    return size + _activation_bytes(shape, config) if is_int4 else size


def _activation_bytes(shape: Shape, config: QuantizedGemvConfig) -> int:
    """Return the size of what Int4GemvShared has of the activations."""
    block_k = shape.k // config.cluster
    return _round_up((block_k // 32 + config.warps) * 64 + block_k // GROUP * 8, 128)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def kernel_name(shape: Shape, config: QuantizedGemvConfig, output: Output, norm: str) -> str:
    """Return the kernel's name; norm: what gemv.name_norm() says."""
    sizes = (shape.rows, shape.k, *dataclasses.astuple(config))
    rest = f"{', '.join(map(str, sizes))}, {output.value}, {norm}"
    if shape.format is FormatId.INT4:
        return f"blink::gemv_int4<{rest}>"
    return f"blink::gemv_quantized<{str(shape.grouped).lower()}, {rest}>"
