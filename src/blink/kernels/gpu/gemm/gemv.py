# SPDX-License-Identifier: Apache-2.0
"""GEMMs of up to 8 rows with a weight, with what comes before and after them in a decoder layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.base import Weight, matrix_of, parts_of
from blink.formats.layouts import Matrix
from blink.formats.schemes import INT4
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import count_processors
from blink.kernels.gpu.gemm import gemv_quantized
from blink.kernels.gpu.gemm.tile_configs import Output, name_origin, read_table
from blink.kernels.gpu.launch import compile_kernel, launch

MAX_ROWS = 8
_UNIT = 32  # k of one row that a load takes at least
_FEW_STEPS = 8  # for each, a lane keeps two 16-byte parts of the activations in registers, or one with few rows
_STAGE_BYTES = 16 << 10
_PIPELINE_BYTES = 64 << 10  # with which three blocks fit an SM


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a GEMM is split: see csrc/kernels/gemm/gemv.cuh."""

    warps: int
    cluster: int
    slices: int  # of 32 k, that one load of a warp takes of the same weight row
    tile: int  # weight rows of a block
    stage_rows: int
    stages: int


def choose_config(rows: int, k: int, n: int) -> TileConfig | None:
    """Return the tile config of a GEMM with a weight [n, k]; None if there is none.

    The preferences follow a sweep on an H200 with the shapes of Llama-3-8B.
    """
    most = 8 if rows <= 2 else 4 if rows <= 4 else 2
    preferred = (8, 4) if rows == 2 or rows > 4 else (4, 8)
    for slices in (count for count in (8, 4, 2, 1) if count <= most):
        units = k // (_UNIT * slices)
        if units * _UNIT * slices != k:
            continue
        limits = (_FEW_STEPS, 2 * _FEW_STEPS) if rows * slices <= 8 else (_FEW_STEPS,)
        for cluster, limit in itertools.product((1, 2, 4, 8), limits):
            for warps in gemv_quantized.list_warps(rows, (*preferred, 7, 6, 5, 3, 2, 1)):
                if units % (warps * cluster) == 0 and units // (warps * cluster) <= limit:
                    return _make_config(rows, k, n, warps, cluster, slices)
    return None


def _make_config(rows: int, k: int, n: int, warps: int, cluster: int, slices: int) -> TileConfig:
    row_bytes = k // cluster * 2
    stage_rows = 8 // slices
    while stage_rows < 8 and 2 * stage_rows * row_bytes <= (_STAGE_BYTES if rows > 1 else _STAGE_BYTES // 2):
        stage_rows *= 2
    # A few blocks an SM: if all of these fit at once, those of the next kernel find no room to start in.
    blocks = n * cluster // 16 / count_processors()
    tile = 32 if 2 < blocks <= 8 else 16
    if rows == 1 and cluster == 1 and 0.5 < blocks <= 1:
        tile = 8  # all of the weight is on its way before the wait
    stages = max(3 if rows == 2 else 2, _PIPELINE_BYTES // (stage_rows * row_bytes))
    return TileConfig(warps, cluster, slices, tile, stage_rows, min(stages, tile // stage_rows))


def _shared_bytes(rows: int, k: int, config: TileConfig) -> int:
    """Return the size of csrc/kernels/gemm/gemv.cuh's GemvShared."""
    pitch = k // config.cluster + (32 if config.slices < 8 else 0)
    pipeline = config.stages * config.stage_rows * pitch * 2
    sums = config.warps * config.slices * rows * (config.tile + 1) + config.warps * rows
    exchanged = config.cluster * rows * (config.tile // config.cluster + 1) + config.cluster * rows
    barriers = (2 * config.stages + 1) * 8
    return _round_up(_round_up(pipeline + (sums + exchanged) * 4, 8) + barriers, 128)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(Output.STORE, x, weight, out, bias=bias)
    return out


def gated(x: Tensor, gate_up: Weight) -> Tensor:
    """Return silu(gate) * up of x @ gate_up.T, whose first half are the gates."""
    out = x.new_empty(x.shape[0], gate_up.shape[0] // 2)
    _launch(Output.GATE, x, gate_up, out)
    return out


def normed_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return rms_norm(x) @ weight.T + bias; norm_weight: bfloat16 or float32."""
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    _launch(Output.STORE, x, weight, out, bias=bias, norm_weight=norm_weight, eps=eps)
    return out


def gated_linear(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Weight, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of rms_norm(x) @ gate_up.T, whose first half are the gates."""
    out = x.new_empty(x.shape[0], gate_up.shape[0] // 2) if out is None else out
    _launch(Output.GATE, x, gate_up, out, norm_weight=norm_weight, eps=eps)
    return out


def add_linear(x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None = None) -> None:
    """Add x @ weight.T + bias to residual in place."""
    _launch(Output.ADD, x, weight, residual, bias=bias)


def refuses(matrix: Matrix, rows: int) -> str | None:
    """Say why the kernels do not take so many rows and a weight; None: they do."""
    if rows > MAX_ROWS:
        return f"more than {MAX_ROWS} rows"
    if matrix.encoding is None:
        return f"a matrix in {matrix.dtype} as {matrix.layout.value}"
    config, _ = _choose_config(matrix, rows)
    return None if config is not None and config.tile <= matrix.n else f"a matrix of {matrix.n} x {matrix.k}"


def describe(matrix: Matrix, rows: int) -> tuple[str, str]:
    """Return the kernel's name and its tiles, in words."""
    config, is_measured = _choose_config(matrix, rows)
    assert config is not None
    name = "gemv" if not matrix.is_packed else f"gemv_{'int4' if matrix.encoding == INT4 else 'quantized'}"
    tiles = f"{config.tile} rows, {config.warps} warps, cluster of {config.cluster}, {config.stages} stages"
    return name, f"{tiles} ({name_origin(measured=is_measured)})"


def _choose_config(matrix: Matrix, rows: int) -> tuple[TileConfig | gemv_quantized.QuantizedGemvConfig | None, bool]:
    """Return how a GEMM is split, and whether that was measured."""
    if not matrix.is_packed:
        return choose_config(rows, matrix.k, matrix.n), False
    shape = gemv_quantized.Shape.of(matrix, rows)
    return gemv_quantized.choose_config(shape), gemv_quantized.key(shape) in read_table()


def _launch(
    output: Output,
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    rows, k = x.shape
    n = out.shape[1]
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype == torch.bfloat16
    assert weight.shape == (2 * n if output is Output.GATE else n, k) and out.shape[0] == rows
    values, scales, groups = parts_of(weight)
    assert values.is_contiguous()
    arguments = args(
        "GemvArgs",
        weight=values,
        bias=bias,
        x=x,
        norm=norm_weight,
        out=out,
        scales=scales,
        groups=groups,
        eps=eps,
        n=n,
    )
    name, config, shared_bytes = _choose_kernel(output, weight, rows, norm_weight)
    outputs = config.tile // 2 if output is Output.GATE else config.tile
    launch(
        compile_kernel(name),
        (-(-n // outputs) * config.cluster, 1),
        32 * (config.warps + 1),
        arguments,
        cluster=config.cluster,
        shared_bytes=shared_bytes,
    )


def name_norm(weight: Tensor | None) -> str:
    """Return the arguments of kernels' templates that say whether they compute a norm, and of which weights."""
    if weight is None:
        return "false"
    return "true, float" if weight.dtype == torch.float32 else "true"


def _choose_kernel(
    output: Output, weight: Weight, rows: int, norm_weight: Tensor | None
) -> tuple[str, TileConfig | gemv_quantized.QuantizedGemvConfig, int]:
    """Return the kernel's name, its tile config, and its shared memory."""
    matrix = matrix_of(weight)
    assert refuses(matrix, rows) is None
    if matrix.is_packed:
        shape = gemv_quantized.Shape.of(matrix, rows)
        chosen = gemv_quantized.choose_config(shape)
        assert chosen is not None
        name = gemv_quantized.kernel_name(shape, chosen, output, name_norm(norm_weight))
        return name, chosen, gemv_quantized.shared_bytes(shape, chosen)
    n, k = weight.shape
    config = choose_config(rows, k, n)
    assert config is not None
    sizes = (rows, k, config.warps, config.cluster, config.slices, config.tile, config.stage_rows, config.stages)
    name = f"blink::gemv<{', '.join(map(str, sizes))}, {output.value}, {name_norm(norm_weight)}>"
    return name, config, _shared_bytes(rows, k, config)
