# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up of GEMMs with weights of 16 bits and 65 to 256 tokens: csrc/kernels/prefill/gate_up.cu.

It runs where it is faster than cuBLAS and the activation after it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from blink.formats.base import matrix_of
from blink.formats.layouts import Matrix
from blink.formats.schemes import BF16
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.activation import activate
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.gemm import bf16
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import BOX_ROW, encode_hi_lo, encode_matrix
from blink.kernels.matmul import GatedMatmul
from blink.plan.site import first_reason

MAX_ROWS = 256
_MIN_ROWS = 65
_SOURCE = "prefill/gate_up.cu"
_THREADS = 384
_SHARED_BYTES = 226 << 10  # GateShared
_ALIGNED = 8  # outputs that are written at once
_TOKENS = (96, 128, 160, 192, 224, 256)  # that the kernel is made for
_MOST_OF_BOTH = 192  # tokens where a warpgroup has gates and their ups: its registers hold no more sums
_CUBLAS = "cuBLAS"  # the candidate that others are compared with


class TileConfig(NamedTuple):
    """How a GEMM is split among blocks."""

    outputs: int  # of a block
    cluster: int  # blocks that share the copies of tokens


# Each is the fastest for some shape.
CONFIGS = (TileConfig(64, 1), TileConfig(64, 4), TileConfig(128, 4))


def multiply(x: Tensor, gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of x @ gate_up.T, whose first half are the gates; both on the GPU."""
    return autotuner.compute(f"silu(gate) * up of {bf16.name_matmul(x, gate_up)}", list_candidates(x, gate_up))


def refuses(matrix: Matrix, rows: int) -> str | None:
    """Say why the kernel does not take a GEMM; None: it does."""
    return first_reason(
        {
            f"a matrix in {matrix.dtype}": matrix.encoding != BF16,
            f"fewer than {_MIN_ROWS} or more than {MAX_ROWS} rows": not _MIN_ROWS <= rows <= MAX_ROWS,
            f"a matrix of {matrix.n} x {matrix.k}": (
                matrix.n % (2 * _ALIGNED) != 0
                or matrix.k % BOX_ROW != 0
                or 2 * matrix.n * matrix.k < bf16.MIN_WEIGHT_BYTES
            ),
            "no Hopper": not has_warpgroups(),
        }
    )


def list_configs(rows: int) -> list[TileConfig]:
    """Return the configs that the kernel has for so many tokens."""
    return [config for config in CONFIGS if config.outputs == CONFIGS[0].outputs or rows <= _MOST_OF_BOTH]


def multiply_with(x: Tensor, gate_up: Tensor, config: TileConfig) -> Tensor:
    """Return silu(gate) * up as the kernel computes it with one config."""
    (rows, k), outputs = x.shape, len(gate_up) // 2
    assert refuses(matrix_of(gate_up), rows) is None and x.is_contiguous() and gate_up.is_contiguous()
    tokens = next(count for count in _TOKENS if rows <= count)
    out = x.new_empty(rows, outputs)
    arguments = args(
        "GateUpArgs",
        weight=encode_hi_lo(gate_up.view(2, outputs, k), config.outputs),
        x=encode_matrix(x, tokens // config.cluster),
        out=out,
        outputs=outputs,
        rows=rows,
        boxes=k // BOX_ROW,
    )
    launch(
        compile_kernel(f"blink::gate_prompts<{tokens}, {config.outputs}, {config.cluster}>", _SOURCE),
        (math.ceil(outputs / config.outputs / config.cluster) * config.cluster, 1),
        _THREADS,
        arguments,
        cluster=config.cluster,
        shared_bytes=_SHARED_BYTES,
    )
    return out


def list_candidates(x: Tensor, gate_up: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the candidates to compute a GEMM that the kernel takes, by their names in the file; cuBLAS's first."""
    candidates: dict[str, Callable[[], Tensor]] = {_CUBLAS: functools.partial(_multiply_plainly, x, gate_up)}
    for config in list_configs(len(x)):
        candidates[f"{config.outputs} outputs, {config.cluster} blocks"] = functools.partial(
            multiply_with, x, gate_up, config
        )
    return candidates


def _multiply_plainly(x: Tensor, gate_up: Tensor) -> Tensor:
    return activate(bf16.multiply(x, gate_up), "silu")


GATED = GatedMatmul(
    "fused gate-up GEMM", refuses, multiply, lambda *_: "or cuBLAS and the activation, as measured at boot"
)
