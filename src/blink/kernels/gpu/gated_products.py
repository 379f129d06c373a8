# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up of products with weights of 16 bits and 65 to 256 tokens: csrc/gpu/prompts/gates.cu, where that is
faster than cuBLAS and the activation behind it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from blink.formats.base import matrix_of
from blink.formats.layouts import Matrix
from blink.formats.schemes import BF16
from blink.kernels.gpu import choices, products
from blink.kernels.gpu.activation import activate
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.decode.launch import compile_kernel, is_compiling_ahead, launch
from blink.kernels.gpu.decode.tensor_map import BOX_ROW, encode_matrix, encode_planes
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.matmul import GatedMatmul
from blink.plan.site import first_reason

MAX_ROWS = 256
_MIN_ROWS = 65
_SOURCE = "prompts/gates.cu"
_THREADS = 384
_SHARED_BYTES = 226 << 10  # GateShared
_ALIGNED = 8  # outputs that are written at once
_TOKENS = (96, 128, 160, 192, 224, 256)  # that the kernel is made for
_MOST_OF_BOTH = 192  # tokens where a warpgroup has gates and ups: its registers hold no more sums
_CUBLAS = "cuBLAS"  # the way that others are compared with


class Split(NamedTuple):
    """How a product is split among blocks."""

    outputs: int  # of a block
    cluster: int  # blocks that share the copies of tokens


# Each is the fastest for some shape.
SPLITS = (Split(64, 1), Split(64, 4), Split(128, 4))


def multiply(x: Tensor, gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of x @ gate_up.T, whose first half are the gates; both on the GPU."""
    name = f"silu(gate) * up of {products.name_product(x, gate_up)}"
    ways = list_ways(x, gate_up)
    if is_compiling_ahead():
        for compute in map(ways.__getitem__, choices.list_likely(name, ways)):
            compute()
    compute = ways[choices.find(name, lambda: ways, ways.__contains__) or _CUBLAS]
    return compute()


def refuses(matrix: Matrix, rows: int) -> str | None:
    """Say why the kernel does not take a product; None: it does."""
    return first_reason(
        {
            f"a matrix in {matrix.dtype}": matrix.encoding != BF16,
            f"fewer than {_MIN_ROWS} or more than {MAX_ROWS} rows": not _MIN_ROWS <= rows <= MAX_ROWS,
            f"a matrix of {matrix.n} x {matrix.k}": (
                matrix.n % (2 * _ALIGNED) != 0
                or matrix.k % BOX_ROW != 0
                or 2 * matrix.n * matrix.k < products.MIN_WEIGHT_BYTES
            ),
            "no Hopper": not has_warpgroups(),
        }
    )


def list_splits(rows: int) -> list[Split]:
    """Return the splits that the kernel has for so many tokens."""
    return [split for split in SPLITS if split.outputs == SPLITS[0].outputs or rows <= _MOST_OF_BOTH]


def multiply_split(x: Tensor, gate_up: Tensor, split: Split) -> Tensor:
    """Return silu(gate) * up as the kernel computes it with one split."""
    (rows, k), outputs = x.shape, len(gate_up) // 2
    assert refuses(matrix_of(gate_up), rows) is None and x.is_contiguous() and gate_up.is_contiguous()
    tokens = next(count for count in _TOKENS if rows <= count)
    out = x.new_empty(rows, outputs)
    arguments = args(
        "GateArgs",
        weight=encode_planes(gate_up.view(2, outputs, k), split.outputs),
        x=encode_matrix(x, tokens // split.cluster),
        out=out,
        outputs=outputs,
        rows=rows,
        boxes=k // BOX_ROW,
    )
    launch(
        compile_kernel(f"blink::gate_prompts<{tokens}, {split.outputs}, {split.cluster}>", _SOURCE),
        (math.ceil(outputs / split.outputs / split.cluster) * split.cluster, 1),
        _THREADS,
        arguments,
        cluster=split.cluster,
        shared_bytes=_SHARED_BYTES,
    )
    return out


def list_ways(x: Tensor, gate_up: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to compute a product that the kernel takes, by their names in the file; cuBLAS's first."""
    ways: dict[str, Callable[[], Tensor]] = {_CUBLAS: functools.partial(_multiply_plainly, x, gate_up)}
    for split in list_splits(len(x)):
        ways[f"{split.outputs} outputs, {split.cluster} blocks"] = functools.partial(multiply_split, x, gate_up, split)
    return ways


def _multiply_plainly(x: Tensor, gate_up: Tensor) -> Tensor:
    return activate(products.multiply(x, gate_up), "silu")


GATED = GatedMatmul(
    "fused gate-up GEMM", refuses, multiply, lambda *_: "or cuBLAS and the activation, as measured at boot"
)
