# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weights of 4 bits with the tokens of prompts: csrc/kernels/prefill/gemm_int4.cu."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from torch import Tensor

from blink.formats.layouts import Matrix
from blink.formats.packed import PackedWeight
from blink.formats.schemes import INT4, FormatId
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import cached, count_free_processors, has_warpgroups
from blink.kernels.gpu.gemm.quantized import FEW_ROWS
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import encode_bytes, encode_hi_lo, encode_matrix
from blink.kernels.matmul import GatedMatmul, Matmul, add_bias
from blink.plan.site import first_reason

_SOURCE = "prefill/gemm_int4.cu"
_TILE_ROWS = 128  # of a block
_THREADS = 384
_SHARED_BYTES = 224 << 10  # ProductShared
_ALIGNED = 8  # outputs that are written at once


class TileConfig(NamedTuple):
    """How a GEMM is split among blocks."""

    tokens: int  # of a block
    cluster: int  # blocks that share k


# Those that are the fastest somewhere; the kernel takes others, too.
CONFIGS = tuple(itertools.starmap(TileConfig, itertools.product((128, 160, 192, 224, 256), (1, 2))))
_MOST_ROWS = 2048  # of more, it is faster to dequantize the weight first
_BESIDE = 96  # tokens that are multiplied while a block does all that their number does not change


def refuses(matrix: Matrix, rows: int, *, gated: bool = False) -> str | None:
    """Say why the kernel does not take a weight; None: it does."""
    return first_reason(
        {
            "no 4 bits": matrix.encoding != INT4,
            f"more than {_MOST_ROWS} rows": rows > _MOST_ROWS,
            f"a matrix of {matrix.n} x {matrix.k}": (
                matrix.n % (2 * _ALIGNED if gated else _ALIGNED) != 0 or matrix.k % FormatId.INT4.unit != 0
            ),
            "no Hopper": not has_warpgroups(),
        }
    )


def multiply(x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
    """Return x @ weight.T, or silu(gate) * up of it, whose first half are the gates; x: contiguous bfloat16."""
    rows, n = len(x), weight.shape[0]
    out = x.new_empty(rows, n // 2 if gated else n)
    launch_gemm(x, weight, out, choose_config(rows, n), gated=gated)
    return out


@cached
def choose_config(rows: int, n: int) -> TileConfig:
    """Return the tile config with which SMs are done first; n: weight rows."""
    processors = count_free_processors()

    def cost(config: TileConfig) -> float:
        clusters = math.ceil(n / _TILE_ROWS) * math.ceil(rows / config.tokens)
        return math.ceil(clusters / (processors // config.cluster)) / config.cluster * (config.tokens + _BESIDE)

    return min(CONFIGS, key=cost)


def launch_gemm(x: Tensor, weight: PackedWeight, out: Tensor, config: TileConfig, *, gated: bool = False) -> None:
    """Write x @ weight.T to out, or silu(gate) * up of it."""
    (rows, k), n = x.shape, weight.shape[0]
    assert (
        refuses(weight.matrix, 1, gated=gated) is None
        and x.is_contiguous()
        and out.is_contiguous()
        and weight.groups is not None
    )
    halves = weight.values.view(2, n // 2, -1) if gated else None
    arguments = args(
        "PrefillGemmArgs",
        weight=encode_bytes(weight.values, _TILE_ROWS) if halves is None else encode_hi_lo(halves, _ALIGNED),
        x=encode_matrix(x, config.tokens),
        words=weight.groups,
        out=out,
        n=out.shape[1],
        rows=rows,
        units=k // FormatId.INT4.unit,
    )
    launch(
        compile_kernel(f"blink::multiply_prompts<{config.tokens}, {config.cluster}, {str(gated).lower()}>", _SOURCE),
        (math.ceil(n / _TILE_ROWS) * config.cluster, math.ceil(rows / config.tokens)),
        _THREADS,
        arguments,
        cluster=config.cluster,
        shared_bytes=_SHARED_BYTES,
    )


def _describe(matrix: Matrix, rows: int) -> str:
    config = choose_config(rows, matrix.n)
    return f"{_TILE_ROWS} x {config.tokens}, cluster of {config.cluster} (by rule)"


def _refuses_gated(matrix: Matrix, rows: int) -> str | None:
    if FEW_ROWS.refuses(matrix, rows) is None:
        return f"with {rows} rows the {FEW_ROWS.name} is faster"
    return refuses(matrix, rows, gated=True)


def _multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return add_bias(multiply(x, weight), bias)


INT4_PREFILL = Matmul("prefill GEMM", refuses, _multiply, _describe)
GATED_INT4_PREFILL = GatedMatmul(
    "prefill GEMM with SiLU", _refuses_gated, functools.partial(multiply, gated=True), _describe
)
