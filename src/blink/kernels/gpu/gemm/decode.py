# SPDX-License-Identifier: Apache-2.0
"""GEMMs of up to 128 rows with a weight, for decoding, with what comes before and after them in a decoder layer.

A norm is split in two. The kernel that writes a residual also writes it times the norm's weight, with its sums of
squares (`NormInput`). The GEMM that reads these applies 1/RMS. Activations are bfloat16 [rows, k]. For weights in 8
bits, and few rows of those in 4, they are hi/lo FP8, uint8 [2, rows, k] (csrc/kernels/common/hi_lo.cuh). The producer
is told which layout the consumer's weights need.

With `ordered` rows are of any number, and a row has the same bits with any other rows: in_tiles.py. All GEMMs of a
step have it, or none.
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
from blink.kernels.gpu.device import has_warpgroups
from blink.kernels.gpu.gemm import decode_hi_lo, decode_hi_lo_int4, decode_int4, in_tiles
from blink.kernels.gpu.gemm.gemm_kernel import GemmKernel, GemmUpdate
from blink.kernels.gpu.gemm.pipeline_config import PipelineConfig, Shape
from blink.kernels.gpu.gemm.tile_configs import (
    GemmConfig,
    Output,
    bucket_rows,
    choose_gemm_config,
    is_measured,
    name_origin,
    read_table,
)
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import TensorMap, encode_bytes, encode_hi_lo, encode_matrix
from blink.plan.site import first_reason

MAX_ROWS = 128
_MAX_PACKED_ROWS = {FormatId.FP8: decode_hi_lo.MAX_ROWS, FormatId.INT4: decode_int4.MAX_ROWS}
_EMBED_THREADS = 256


@dataclass(frozen=True, slots=True)
class NormInput:
    """The input of a GEMM behind a norm, but for the rate."""

    x: Tensor  # [rows, k] or hi/lo FP8, times the norm's weight
    square_sums: Tensor  # float32 [parts, rows rounded up], which add up to those of the rows before the norm


def embed(
    ids: Tensor,
    embedding: Tensor,
    norm_weight: Tensor,
    *,
    hi_lo: FormatId | None = None,
    tokens: int | None = None,
    early: bool = True,
) -> tuple[Tensor, NormInput]:
    """Return the residual [rows, hidden] of token ids [rows], and the norm of it. tokens: rows padded as the step's.

    early: whether it is launched early; else the kernels behind it see what is in front of it without a wait.
    """
    rows, hidden = ids.shape[0], embedding.shape[1]
    assert ids.dtype == torch.int32 and ids.is_contiguous() and embedding.is_contiguous() and hidden % 8 == 0
    residual = embedding.new_empty(rows, hidden)
    normed = NormInput(decode_hi_lo.new_inputs(residual, hi_lo=hi_lo), new_square_sums(residual, 1, tokens))
    arguments = args(
        "EmbedArgs",
        ids=ids,
        embedding=embedding,
        norm=norm_weight,
        residual=residual,
        next_x=normed.x,
        next_square_sums=normed.square_sums,
        hidden=hidden,
    )
    kernel = compile_kernel(f"blink::embed<{decode_hi_lo.name_order(hi_lo)}>")
    launch(kernel, (rows, 1), _EMBED_THREADS, arguments, pdl=early)
    return residual, normed


def normed_linear(
    normed: NormInput,
    eps: float,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    inverse_rms: Tensor | None = None,
    ordered: bool = False,
    update: GemmUpdate | None = None,
) -> Tensor:
    """Return the norm's GEMM with a weight [n, k], plus the bias. update: as FusedUpdates has it for normed.x.

    inverse_rms: float32 [rows], where the norm's rates are written for who else applies them.
    """
    out = _new(normed.x, weight.shape[0])
    _launch(
        Output.STORE,
        normed.x,
        weight,
        out,
        bias=bias,
        square_sums=normed.square_sums,
        inverse_rms=inverse_rms,
        eps=eps,
        ordered=ordered,
        update=update,
    )
    return out


def gated_linear(
    normed: NormInput,
    eps: float,
    gate_up: Weight,
    *,
    hi_lo: FormatId | None = None,
    ordered: bool = False,
    update: GemmUpdate | None = None,
) -> Tensor:
    """Return silu(gate) * up of the norm's GEMM with gate_up, whose first half are the gates."""
    out = _new(normed.x, gate_up.shape[0] // 2, hi_lo=hi_lo)
    _launch(
        Output.GATE,
        normed.x,
        gate_up,
        out,
        square_sums=normed.square_sums,
        eps=eps,
        writes=hi_lo,
        ordered=ordered,
        update=update,
    )
    return out


def add_linear(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    next_norm: Tensor,
    bias: Tensor | None = None,
    *,
    hi_lo: FormatId | None = None,
    tokens: int | None = None,
    ordered: bool = False,
    update: GemmUpdate | None = None,
) -> NormInput:
    """Add x @ weight.T + bias to residual in place; return the norm of it. tokens: rows padded as the step's."""
    next_x = decode_hi_lo.new_inputs(residual, hi_lo=hi_lo)
    square_sums = _launch(
        Output.ADD,
        x,
        weight,
        residual,
        bias=bias,
        next_norm=next_norm,
        next_x=next_x,
        writes=hi_lo,
        tokens=tokens,
        ordered=ordered,
        update=update,
    )
    return NormInput(next_x, square_sums)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, *, ordered: bool = False) -> Tensor:
    """Return x @ weight.T + bias."""
    out = _new(x, weight.shape[0])
    _launch(Output.STORE, x, weight, out, bias=bias, ordered=ordered)
    return out


def gated(x: Tensor, gate_up: Weight) -> Tensor:
    """Return silu(gate) * up of x @ gate_up.T, whose first half are the gates."""
    out = _new(x, gate_up.shape[0] // 2)
    _launch(Output.GATE, x, gate_up, out)
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
    configs = (_split_packed(Shape.of(matrix, output, bucket_rows(rows))) for output in Output)
    return None if all(configs) else f"a matrix of {matrix.n} x {matrix.k}"


def describe(matrix: Matrix, output: Output, tokens: int) -> tuple[str, str]:
    """Return the kernel's name and its tiles, in words. tokens: rows, rounded up."""
    if matrix.is_packed:
        shape = Shape.of(matrix, output, tokens)
        module, config = kernels_for(shape.format, tokens), _split_packed(shape)
        assert config is not None
        name, measured = module.__name__.rpartition(".")[2], module.key(shape) in read_table()
        return name, f"{config.tile} x {tokens}, {_describe_blocks(config.cluster, config.stages, measured=measured)}"
    chosen = choose_gemm_config(output, tokens, matrix.n, matrix.k)
    measured = is_measured(output, tokens, matrix.n, matrix.k)
    blocks = _describe_blocks(chosen.cluster, chosen.stages, measured=measured)
    return "gemm", f"{chosen.tile} x {tokens} x {chosen.stage_k}, {blocks}"


def _describe_blocks(cluster: int, stages: int, *, measured: bool) -> str:
    return f"cluster of {cluster}, {stages} stages ({name_origin(measured=measured)})"


def new_square_sums(x: Tensor, parts: int, tokens: int | None = None) -> Tensor:
    """Allocate room for the rows' sums of squares in so many parts. tokens: rows padded otherwise than by default."""
    return torch.empty(parts, tokens or bucket_rows(x.shape[0]), dtype=torch.float32, device=x.device)


def order_for(matrix: Matrix, rows: int) -> FormatId | None:
    """Return for which format the activations of so many rows are hi/lo FP8; None: they are bfloat16."""
    if matrix.encoding is None or not matrix.is_packed:
        return None
    format = matrix.encoding.format
    return None if kernels_for(format, bucket_rows(rows)) is decode_int4 else format


def kernels_for(format: FormatId, tokens: int) -> ModuleType:
    """Return the module with the tile configs of GEMMs of so many rows, rounded up, with packed weights.

    It has key(), list_configs() and choose_config().
    """
    if format is FormatId.FP8:
        return decode_hi_lo
    return decode_hi_lo_int4 if tokens <= decode_hi_lo_int4.MAX_ROWS else decode_int4


def _new(x: Tensor, columns: int, *, hi_lo: FormatId | None = None) -> Tensor:
    """Allocate activations of as many rows as some have."""
    rows = x.shape[-2]
    if hi_lo is not None:
        return decode_hi_lo.new_hi_lo(rows, columns, x.device)
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)


def _launch(
    output: Output,
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    square_sums: Tensor | None = None,
    inverse_rms: Tensor | None = None,
    eps: float = 0.0,
    next_norm: Tensor | None = None,
    next_x: Tensor | None = None,
    writes: FormatId | None = None,
    tokens: int | None = None,
    ordered: bool = False,
    update: GemmUpdate | None = None,
) -> Tensor:
    """Launch a GEMM; return the squares of an ADD's rows.

    writes: for which weights what it writes are hi/lo FP8; tokens: rows padded, where nothing else says.
    """
    (rows, k), n, norm, matrix = x.shape[-2:], out.shape[-1], square_sums is not None, matrix_of(weight)
    assert weight.shape == (2 * n if output is Output.GATE else n, k) and out.shape[-2] == rows
    tokens = square_sums.shape[1] if square_sums is not None else tokens or _pad(rows, matrix, ordered=ordered)
    values, scales, groups = parts_of(weight)
    assert x.is_contiguous() and out.is_contiguous() and values.is_contiguous() and rows <= tokens
    kernel = _choose(output, x, matrix, tokens, norm=norm, writes=writes, ordered=ordered)
    assert update is None or not (ordered or matrix.is_packed)
    outputs = kernel.tile // 2 if output is Output.GATE else kernel.tile
    parts = -(-n // outputs) * kernel.cluster
    next_square_sums = new_square_sums(out, parts if output is Output.ADD else 1, tokens)
    written = args(
        "OutputArgs",
        bias=bias,
        out=out,
        square_sums=square_sums,
        next_norm=next_norm,
        next_x=next_x,
        next_square_sums=next_square_sums,
        scales=scales,
        inverse_rms=inverse_rms,
        eps=eps,
        per_k=1 / k,
        n=n,
        rows=rows,
        num_square_sums=0 if square_sums is None else square_sums.shape[0],
    )
    operands, blocks = _encode(values, outputs, x, kernel.tokens, matrix), parts * tokens // kernel.tokens
    kernel.launch(blocks, operands, written, num_groups=-(-k // GROUP), groups=groups, update=update)
    return next_square_sums


def _encode(values: Tensor, outputs: int, x: Tensor, tokens: int, matrix: Matrix) -> tuple[TensorMap, TensorMap]:
    encode = encode_hi_lo if decode_hi_lo.are_hi_lo(x) else encode_matrix
    of_weight = encode_bytes(values, outputs) if matrix.is_packed else encode_matrix(values, outputs)
    return of_weight, encode(x, tokens)


def _pad(rows: int, matrix: Matrix, *, ordered: bool) -> int:
    return in_tiles.pad(rows, packed=matrix.is_packed) if ordered else bucket_rows(rows)


def _choose(
    output: Output, x: Tensor, matrix: Matrix, tokens: int, *, norm: bool, writes: FormatId | None, ordered: bool
) -> GemmKernel:
    if ordered:
        assert decode_hi_lo.are_hi_lo(x) == matrix.is_packed
        return in_tiles.choose_kernel(output, matrix, tokens, norm=norm, writes=writes)
    assert refuses(matrix, tokens) is None and decode_hi_lo.are_hi_lo(x) == (order_for(matrix, tokens) is not None)
    if matrix.is_packed:
        assert tokens == bucket_rows(tokens)
        return _choose_packed(Shape.of(matrix, output, tokens), norm=norm, writes=writes)
    k = matrix.k
    config = choose_gemm_config(output, tokens, matrix.n, k)
    name = kernel_name(output, tokens, config, norm=norm, writes=writes)
    stages, shared_bytes = -(-k // config.stage_k), config.shared_bytes(output, tokens)
    return GemmKernel(name, config.tile, tokens, config.cluster, config.threads, stages, shared_bytes)


def _choose_packed(shape: Shape, *, norm: bool, writes: FormatId | None) -> GemmKernel:
    config = _split_packed(shape)
    assert config is not None
    name = config.kernel_name(shape, norm=norm, writes=writes)
    sizes = config.threads, config.total_stages(shape), config.shared_bytes(shape)
    return GemmKernel(name, config.tile, shape.tokens, config.cluster, *sizes)


def _split_packed(shape: Shape) -> PipelineConfig | None:
    return kernels_for(shape.format, shape.tokens).choose_config(shape)


def kernel_name(output: Output, tokens: int, config: GemmConfig, *, norm: bool, writes: FormatId | None = None) -> str:
    """Return the name of a kernel of csrc/kernels/gemm/gemm.cuh; writes: the order of hi/lo FP8 that it writes."""
    sizes = (tokens, config.groups, config.cluster, config.stage_k, config.stages)
    return decode_hi_lo.name_kernel("gemm", sizes, output, norm=norm, writes=writes)
