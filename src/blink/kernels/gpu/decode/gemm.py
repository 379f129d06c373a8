# SPDX-License-Identifier: Apache-2.0
"""Products of up to 128 rows with a weight, for decoding, with what stands before and behind them in a decoder layer.

A norm is split in two: who writes a residual also writes it times the norm's weight, with its squares (`Normed`), and
the product that reads these applies the rate. Activations are bfloat16 [rows, k] or, for weights in 8 bits and few rows
of those in 4, planes of them, uint8 [2, rows, k] (csrc/gpu/decode/planes.cuh); who writes activations is told for which
weights' format.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from blink.formats.base import Weight, matrix_of, parts_of
from blink.formats.layouts import Matrix
from blink.formats.schemes import GROUP, FormatId
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.decode import gemm_int4, gemm_planes, gemm_planes_int4
from blink.kernels.gpu.decode.launch import compile_kernel, launch
from blink.kernels.gpu.decode.ring_split import RingSplit, Shape
from blink.kernels.gpu.decode.splits import (
    GemmSplit,
    Output,
    choose_gemm_split,
    is_measured,
    name_origin,
    pad_rows,
    read_table,
)
from blink.kernels.gpu.decode.tensor_map import TensorMap, encode_bytes, encode_matrix, encode_planes
from blink.kernels.gpu.device import has_warpgroups
from blink.plan.site import first_reason

MAX_ROWS = 128
_MAX_PACKED_ROWS = {FormatId.FP8: gemm_planes.MAX_ROWS, FormatId.INT4: gemm_int4.MAX_ROWS}
_EMBED_THREADS = 256


@dataclass(frozen=True, slots=True)
class Normed:
    """The input of a product behind a norm, but for the rate."""

    x: Tensor  # [rows, k] or planes, times the norm's weight
    squares: Tensor  # float32 [parts, rows rounded up], which add up to those of the rows before the norm


def embed(
    ids: Tensor, embedding: Tensor, norm_weight: Tensor, *, planes: FormatId | None = None, tokens: int | None = None
) -> tuple[Tensor, Normed]:
    """Return the residual [rows, hidden] of token ids [rows], and the norm of it. tokens: rows padded as the step's."""
    rows, hidden = ids.shape[0], embedding.shape[1]
    assert ids.dtype == torch.int32 and ids.is_contiguous() and embedding.is_contiguous() and hidden % 8 == 0
    residual = embedding.new_empty(rows, hidden)
    normed = Normed(gemm_planes.new_inputs(residual, planes=planes), new_squares(residual, 1, tokens))
    arguments = args(
        "EmbedArgs",
        ids=ids,
        embedding=embedding,
        norm=norm_weight,
        residual=residual,
        next_x=normed.x,
        next_squares=normed.squares,
        hidden=hidden,
    )
    launch(compile_kernel(f"blink::embed<{gemm_planes.name_order(planes)}>"), (rows, 1), _EMBED_THREADS, arguments)
    return residual, normed


def normed_linear(
    normed: Normed, eps: float, weight: Weight, bias: Tensor | None = None, *, rates: Tensor | None = None
) -> Tensor:
    """Return the norm's product with a weight [n, k], plus the bias.

    rates: float32 [rows], where the norm's rates are written for who else applies them.
    """
    out = _new(normed.x, weight.shape[0])
    _launch(Output.STORE, normed.x, weight, out, bias=bias, squares=normed.squares, rates=rates, eps=eps)
    return out


def gated_linear(normed: Normed, eps: float, gate_up: Weight, *, planes: FormatId | None = None) -> Tensor:
    """Return silu(gate) * up of the norm's product with gate_up, whose first half are the gates."""
    out = _new(normed.x, gate_up.shape[0] // 2, planes=planes)
    _launch(Output.GATE, normed.x, gate_up, out, squares=normed.squares, eps=eps, writes=planes)
    return out


def add_linear(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    next_norm: Tensor,
    bias: Tensor | None = None,
    *,
    planes: FormatId | None = None,
    tokens: int | None = None,
) -> Normed:
    """Add x @ weight.T + bias to residual in place; return the norm of it. tokens: rows padded as the step's."""
    next_x = gemm_planes.new_inputs(residual, planes=planes)
    squares = _launch(
        Output.ADD, x, weight, residual, bias=bias, next_norm=next_norm, next_x=next_x, writes=planes, tokens=tokens
    )
    return Normed(next_x, squares)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return x @ weight.T."""
    out = _new(x, weight.shape[0])
    _launch(Output.STORE, x, weight, out)
    return out


def refuses(matrix: Matrix, rows: int) -> str | None:
    """Say why the kernels do not take so many rows and a weight; None: they do."""
    encoding = matrix.encoding
    if encoding is None or (matrix.is_packed and encoding.format not in _MAX_PACKED_ROWS):
        return f"a matrix in {matrix.dtype} as {matrix.layout.value}"
    most = _MAX_PACKED_ROWS[encoding.format] if matrix.is_packed else MAX_ROWS
    reason = first_reason(
        {
            "no Hopper": not has_warpgroups(),
            f"more than {most} rows": rows > most,
            f"a matrix of {matrix.n} x {matrix.k}": matrix.n % 8 != 0 or matrix.k % 8 != 0,
        }
    )
    if reason or not matrix.is_packed:
        return reason
    splits = (_split_packed(Shape.of(matrix, output, pad_rows(rows))) for output in Output)
    return None if all(splits) else f"a matrix of {matrix.n} x {matrix.k}"


def describe(matrix: Matrix, output: Output, tokens: int) -> tuple[str, str]:
    """Return the kernel's name and its tiles, in words. tokens: rows, rounded up."""
    if matrix.is_packed:
        shape = Shape.of(matrix, output, tokens)
        module, split = kernels_for(shape.format, tokens), _split_packed(shape)
        assert split is not None
        name, measured = module.__name__.rpartition(".")[2], module.key(shape) in read_table()
        return name, f"{split.tile} x {tokens}, {_describe_blocks(split.cluster, split.stages, measured=measured)}"
    chosen = choose_gemm_split(output, tokens, matrix.n, matrix.k)
    measured = is_measured(output, tokens, matrix.n, matrix.k)
    blocks = _describe_blocks(chosen.cluster, chosen.stages, measured=measured)
    return "gemm", f"{chosen.tile} x {tokens} x {chosen.stage_k}, {blocks}"


def _describe_blocks(cluster: int, stages: int, *, measured: bool) -> str:
    return f"cluster of {cluster}, {stages} stages ({name_origin(measured=measured)})"


def new_squares(x: Tensor, parts: int, tokens: int | None = None) -> Tensor:
    """Allocate room for the rows' sums of squares in so many parts. tokens: rows padded otherwise than by default."""
    return torch.empty(parts, tokens or pad_rows(x.shape[0]), dtype=torch.float32, device=x.device)


def order_for(matrix: Matrix, rows: int) -> FormatId | None:
    """Return for which format the activations of so many rows are planes; None: they are bfloat16."""
    if matrix.encoding is None or not matrix.is_packed:
        return None
    format = matrix.encoding.format
    return None if kernels_for(format, pad_rows(rows)) is gemm_int4 else format


def kernels_for(format: FormatId, tokens: int) -> ModuleType:
    """Return the module that splits products of so many rows, rounded up, with packed weights.

    It has key(), list_splits() and choose_split().
    """
    if format is FormatId.FP8:
        return gemm_planes
    return gemm_planes_int4 if tokens <= gemm_planes_int4.MAX_ROWS else gemm_int4


def _new(x: Tensor, columns: int, *, planes: FormatId | None = None) -> Tensor:
    """Allocate activations of as many rows as some have."""
    rows = x.shape[-2]
    if planes is not None:
        return gemm_planes.new_planes(rows, columns, x.device)
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel with what its launch must know of how it splits the product."""

    name: str
    tile: int
    cluster: int
    threads: int
    stages: int  # of all of k
    shared_bytes: int

    def launch(
        self,
        blocks: int,
        operands: tuple[TensorMap, TensorMap],
        output: bytes,
        *,
        num_groups: int,
        groups: Tensor | None,
    ) -> None:
        """Launch so many blocks. operands: weight and activations; output: OutputArgs."""
        weight, x = operands
        launch(
            compile_kernel(self.name),
            (blocks, 1),
            self.threads,
            args(
                "GemmArgs",
                weight=weight,
                x=x,
                output=output,
                stages=self.stages,
                num_groups=num_groups,
                groups=groups,
            ),
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
        )


def _launch(
    output: Output,
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    rates: Tensor | None = None,
    eps: float = 0.0,
    next_norm: Tensor | None = None,
    next_x: Tensor | None = None,
    writes: FormatId | None = None,
    tokens: int | None = None,
) -> Tensor:
    """Launch a product; return the squares of an ADD's rows.

    writes: for which weights what it writes are planes; tokens: rows padded, where no squares say.
    """
    (rows, k), n = x.shape[-2:], out.shape[-1]
    assert weight.shape == (2 * n if output is Output.GATE else n, k) and out.shape[-2] == rows
    tokens = squares.shape[1] if squares is not None else tokens or pad_rows(rows)
    assert x.is_contiguous() and out.is_contiguous() and rows <= tokens
    matrix = matrix_of(weight)
    kernel = _choose(output, x, matrix, tokens, norm=squares is not None, writes=writes)
    outputs = kernel.tile // 2 if output is Output.GATE else kernel.tile
    blocks = -(-n // outputs) * kernel.cluster
    next_squares = new_squares(out, blocks if output is Output.ADD else 1, tokens)
    values, scales, groups = parts_of(weight)
    written = args(
        "OutputArgs",
        bias=bias,
        out=out,
        squares=squares,
        next_norm=next_norm,
        next_x=next_x,
        next_squares=next_squares,
        scales=scales,
        rates=rates,
        eps=eps,
        per_k=1 / k,
        n=n,
        rows=rows,
        num_squares=0 if squares is None else squares.shape[0],
    )
    rows_of_x = encode_planes(x, tokens) if gemm_planes.are_planes(x) else encode_matrix(x, tokens)
    of_weight = encode_bytes(values, outputs) if matrix.is_packed else encode_matrix(values, outputs)
    assert values.is_contiguous()
    kernel.launch(blocks, (of_weight, rows_of_x), written, num_groups=-(-k // GROUP), groups=groups)
    return next_squares


def _choose(output: Output, x: Tensor, matrix: Matrix, tokens: int, *, norm: bool, writes: FormatId | None) -> _Kernel:
    assert refuses(matrix, tokens) is None and gemm_planes.are_planes(x) == (order_for(matrix, tokens) is not None)
    if matrix.is_packed:
        assert tokens == pad_rows(tokens)
        return _choose_packed(Shape.of(matrix, output, tokens), norm=norm, writes=writes)
    k = matrix.k
    split = choose_gemm_split(output, tokens, matrix.n, k)
    name = kernel_name(output, tokens, split, norm=norm, writes=writes)
    stages, shared_bytes = -(-k // split.stage_k), split.shared_bytes(output, tokens)
    return _Kernel(name, split.tile, split.cluster, 128 * split.groups + 64, stages, shared_bytes)


def _choose_packed(shape: Shape, *, norm: bool, writes: FormatId | None) -> _Kernel:
    split = _split_packed(shape)
    assert split is not None
    name = split.kernel_name(shape, norm=norm, writes=writes)
    return _Kernel(name, split.tile, split.cluster, split.threads, split.total_stages(shape), split.shared_bytes(shape))


def _split_packed(shape: Shape) -> RingSplit | None:
    return kernels_for(shape.format, shape.tokens).choose_split(shape)


def kernel_name(output: Output, tokens: int, split: GemmSplit, *, norm: bool, writes: FormatId | None = None) -> str:
    """Return the name of a kernel of csrc/gpu/decode/gemm.cuh; writes: the order of planes that it writes."""
    sizes = (tokens, split.groups, split.cluster, split.stage_k, split.stages)
    return gemm_planes.name_kernel("gemm", sizes, output, norm=norm, writes=writes)
