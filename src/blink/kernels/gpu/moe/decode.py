# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts MLP of up to 8 rows that decode, after the router: gates of the chosen experts, weighted sum.

Only the chosen experts' weights are read, each once, whichever rows chose it; nothing is sorted or gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blink.formats.experts import ExpertWeights, find_encoding, split_experts
from blink.formats.layouts import ExpertMatrices
from blink.formats.schemes import BF16, FP8_BLOCK, FP8_ROW, GROUP, INT4, Encoding, FormatId
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import count_free_processors
from blink.kernels.gpu.gemm.decode import NormInput, new_square_sums
from blink.kernels.gpu.gemm.decode_hi_lo import new_inputs, order_number
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.plan.site import first_reason

MAX_ROWS = 8
_PIPELINE_BYTES, _MOST_BYTES = 96 << 10, 200 << 10  # of which two blocks fit an SM; of which one does
_MOST_K = 512  # of a warp: a lane keeps as many bytes of the activations in registers
_MOST_CHOICES = 32  # of a row


ENCODINGS = (BF16, FP8_ROW, FP8_BLOCK, INT4)  # that the kernels read: csrc/kernels/moe/moe.cuh


def unit_of(encoding: Encoding) -> int:
    """Return of how many k a warp takes a multiple."""
    return {BF16: 32, FP8_ROW: 64}.get(encoding, GROUP)


def count_words(encoding: Encoding, k: int) -> int:
    """Return how many words of scales a weight row of k has."""
    return {BF16: 0, FP8_ROW: 1}.get(encoding, k // GROUP)


@dataclass(frozen=True, slots=True)
class Routes:
    """From what the kernels find out which experts each row chooses."""

    logits: Tensor  # [rows, experts]
    context_lens: Tensor  # int32 [rows]; rows without context choose none
    top_k: int
    renormalize: bool

    def most_experts(self) -> int:
        """Return how many experts all rows together can choose."""
        rows, num_experts = self.logits.shape
        return min(rows * self.top_k, num_experts)


@dataclass(frozen=True, slots=True)
class MoeGateConfig:
    """How the fused gate-up GEMM is split."""

    warps: int  # that share k
    outputs: int  # of an expert, that a block computes at once
    stages: int  # of a block's pipeline of weight rows
    blocks: int  # of an SM


# Of one row, and of more.
_GATES_OF_ONE = {
    BF16: MoeGateConfig(4, 4, 2, 2),
    FP8_ROW: MoeGateConfig(8, 8, 3, 2),
    FP8_BLOCK: MoeGateConfig(8, 8, 2, 3),
    INT4: MoeGateConfig(4, 8, 4, 3),
}
_GATES = {
    BF16: MoeGateConfig(4, 8, 2, 2),
    FP8_ROW: MoeGateConfig(4, 4, 2, 3),
    FP8_BLOCK: MoeGateConfig(4, 4, 4, 3),
    INT4: MoeGateConfig(4, 4, 4, 4),
}


@dataclass(frozen=True, slots=True)
class MoeDownConfig:
    """How the GEMM that leads back to the residual is split."""

    warps: int  # that share k
    outputs: int  # of a block
    stages: int  # of a block's pipeline of weight rows


def choose_gate_config(rows: int, hidden: int, size: int, encoding: Encoding = BF16) -> MoeGateConfig | None:
    """Return the tile config of the fused gate-up GEMM; None if there is none.

    The preferences above and below are those of Qwen3-30B-A3B on an H200.
    """
    preferred = _GATES_OF_ONE[encoding] if rows == 1 else _GATES[encoding]
    warps = _choose_warps(hidden, (preferred.warps, 8, 4), encoding)
    stages = _fit_stages(preferred.stages, 8 * hidden * encoding.format.bits // 8)
    outputs = 4 if size % 8 else preferred.outputs
    blocks = preferred.blocks if warps <= preferred.warps else 2
    return MoeGateConfig(warps, outputs, stages, blocks) if warps and stages and size % 4 == 0 else None


def choose_down_config(rows: int, size: int, hidden: int, encoding: Encoding = BF16) -> MoeDownConfig | None:
    """Return the tile config of the GEMM that leads back to the residual; None if there is none."""
    warps = _choose_warps(size, (3, 2, 4) if rows == 1 and not encoding.grouped else (3, 4), encoding)
    words = rows * _MOST_CHOICES * 8 * count_words(encoding, size)
    stages = _fit_stages(_prefer_stages(rows, encoding), size * (8 * encoding.format.bits // 8 + 2 * rows), 4 * words)
    fits = warps and stages and hidden % 8 == 0 and 8 * rows <= 32 * (warps + 1)
    return MoeDownConfig(warps, 8, stages) if fits else None


def _prefer_stages(rows: int, encoding: Encoding) -> int:
    return 6 if rows == 1 or encoding.grouped else 4


def _choose_warps(k: int, preferred: tuple[int, ...], encoding: Encoding) -> int:
    for warps in (*preferred, 4, 8, 6, 5, 3, 7, 2, 1):
        if k % (unit_of(encoding) * warps) == 0 and k // warps <= _MOST_K:
            return warps
    return 0


def _fit_stages(preferred: int, stage_bytes: int, other_bytes: int = 0) -> int:
    stages = max(2, min(preferred, _PIPELINE_BYTES // stage_bytes))
    return stages if stages * stage_bytes + other_bytes <= _MOST_BYTES else 0


def refuses(experts: ExpertMatrices, rows: int) -> str | None:
    """Say why the kernels do not take so many rows and some experts; None: they do."""
    encoding, top_k = experts.encoding, experts.top_k
    if encoding is None or encoding not in ENCODINGS or experts.dtype != "bfloat16":
        return f"experts in {experts.dtype} kept as the kernels do not read them"
    reason = first_reason(
        {
            f"more than {MAX_ROWS} rows": rows > MAX_ROWS,
            f"{experts.experts} experts": experts.experts % 32 != 0,
            f"{top_k} experts of a token": top_k > min(experts.experts, _MOST_CHOICES),
        }
    )
    if reason:
        return reason
    gate = choose_gate_config(rows, experts.hidden, experts.size, encoding)
    down = choose_down_config(rows, experts.size, experts.hidden, encoding)
    return f"experts of {experts.hidden} x {experts.size}" if gate is None or down is None else None


def describe(experts: ExpertMatrices, rows: int) -> str:
    """Return the tiles of both GEMMs, in words."""
    assert experts.encoding is not None
    gate = choose_gate_config(rows, experts.hidden, experts.size, experts.encoding)
    down = choose_down_config(rows, experts.size, experts.hidden, experts.encoding)
    assert gate is not None and down is not None
    tiles = (f"{config.outputs} outputs, {config.warps} warps, {config.stages} stages" for config in (gate, down))
    return f"{' | '.join(tiles)} (by rule)"


def gate_experts(x: Tensor, norm_weight: Tensor, eps: float, gate_up: ExpertWeights, routes: Routes) -> Tensor:
    """Return silu(gate) * up of each row's experts, in their order, for rms_norm(x): [rows * top_k, size].

    gate_up: [experts, 2 * size, hidden], gates first; if quantized, the results are such as down_experts wants
    them. No kernel of the same step may write the routes' context_lens.
    """
    rows, hidden = x.shape
    num_experts, size = gate_up.shape[0], gate_up.shape[1] // 2
    encoding, values, words = _split(gate_up)
    config = choose_gate_config(rows, hidden, size, encoding)
    assert config is not None and gate_up.shape == (num_experts, 2 * size, hidden)
    assert x.is_contiguous() and x.dtype == torch.bfloat16
    out = x.new_empty(rows * routes.top_k, size)
    sizes = (rows, num_experts, routes.top_k, hidden, size)
    numbers = (*sizes, config.warps, config.outputs, config.stages, config.blocks, encoding.cpp)
    numbers += ("float",) * (norm_weight.dtype == torch.float32)
    arguments = args(
        "MoeGateArgs",
        routing=_routing(routes, x),
        weight=values,
        x=x,
        norm=norm_weight,
        out=out,
        words=words,
        eps=eps,
    )
    blocks = config.blocks * count_free_processors()
    launch(
        compile_kernel(f"blink::moe_gate<{', '.join(map(str, numbers))}>"),
        (min(blocks, routes.most_experts() * (size // config.outputs)), 1),
        32 * (config.warps + 1),
        arguments,
        shared_bytes=_shared_bytes(
            routes,
            config.stages,
            (8, hidden * encoding.format.bits // 8, 8 * count_words(encoding, hidden)),
            rows * config.warps * (2 * (2 * config.outputs + 1) + 1),
        ),
    )
    return out


def down_experts(x: Tensor, down: ExpertWeights, routes: Routes, residual: Tensor) -> None:
    """Add the weighted results of gate_experts times down [experts, hidden, size] to residual in place.

    The kernel of gate_experts must be in front, which has waited for the logits: this one reads them at once. Another
    PDL launch may stand between both.
    """
    _launch_down(x, down, routes, residual)


def down_normed_experts(
    x: Tensor,
    down: ExpertWeights,
    routes: Routes,
    residual: Tensor,
    next_norm: Tensor,
    *,
    hi_lo: FormatId | None = None,
) -> NormInput:
    """Do the same and return the norm of the residual; hi_lo: as hi/lo FP8 for such weights."""
    rows, hidden = residual.shape
    config = choose_down_config(rows, down.shape[2], hidden, _split(down)[0])
    assert config is not None
    normed = NormInput(new_inputs(residual, hi_lo=hi_lo), new_square_sums(residual, hidden // config.outputs))
    _launch_down(x, down, routes, residual, next_norm, normed, hi_lo)
    return normed


def _launch_down(
    x: Tensor,
    down: ExpertWeights,
    routes: Routes,
    residual: Tensor,
    next_norm: Tensor | None = None,
    normed: NormInput | None = None,
    hi_lo: FormatId | None = None,
) -> None:
    rows, hidden = residual.shape
    num_experts, size = down.shape[0], down.shape[2]
    encoding, values, words = _split(down)
    config = choose_down_config(rows, size, hidden, encoding)
    assert config is not None and down.shape == (num_experts, hidden, size) and x.shape == (rows * routes.top_k, size)
    assert x.is_contiguous() and residual.is_contiguous() and residual.dtype == torch.bfloat16
    numbers = (rows, num_experts, routes.top_k, size, config.warps, config.outputs, config.stages, encoding.cpp)
    arguments = args(
        "MoeDownArgs",
        routing=_routing(routes, x),
        weight=values,
        x=x,
        residual=residual,
        next_norm=next_norm,
        next_x=None if normed is None else normed.x,
        next_square_sums=None if normed is None else normed.square_sums,
        words=words,
        n=hidden,
        hi_lo=order_number(hi_lo),
    )
    stage_rows = config.outputs + 16 // encoding.format.bits * rows  # a row of activations takes several of a stage's
    launch(
        compile_kernel(f"blink::moe_down<{', '.join(map(str, numbers))}>"),
        (hidden // config.outputs, 1),
        32 * (config.warps + 1),
        arguments,
        shared_bytes=_shared_bytes(
            routes,
            config.stages,
            (stage_rows, size * encoding.format.bits // 8, 0),
            rows * config.warps * (config.outputs + 1)
            + routes.most_experts() * config.outputs * count_words(encoding, size),
        ),
    )


def _split(weight: ExpertWeights) -> tuple[Encoding, Tensor, Tensor | None]:
    """Return how weights are kept, their values, and their words of scales."""
    encoding = find_encoding(weight)
    assert encoding is not None and encoding in ENCODINGS
    return encoding, *split_experts(weight)


def _routing(routes: Routes, x: Tensor) -> bytes:
    assert routes.logits.is_contiguous() and routes.logits.dtype == x.dtype
    assert routes.context_lens.dtype == torch.int32 and routes.context_lens.shape[0] >= routes.logits.shape[0]
    return args("RoutingArgs", logits=routes.logits, context_lens=routes.context_lens, renormalize=routes.renormalize)


def _shared_bytes(routes: Routes, num_stages: int, stage: tuple[int, int, int], sums: int) -> int:
    """Return the size of what a kernel keeps in shared memory: pipeline, routing, float sums and words.

    stage: rows, bytes of a row, words.
    """
    rows, num_experts = routes.logits.shape
    stage_rows, row_bytes, words = stage
    pipeline = num_stages * (stage_rows * row_bytes + 16)
    routing = rows * num_experts // 32 + rows * routes.top_k + routes.most_experts() + 1
    return _round_up(_round_up(pipeline, 128) + (routing + sums + num_stages * words + 4) * 4, 128)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
