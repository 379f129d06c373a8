# SPDX-License-Identifier: Apache-2.0
"""GEMMs of up to 256 rows with the experts that they chose: csrc/kernels/moe/grouped_gemm.cuh.

The rows of one expert are adjacent: expert e's from row `e * places` on. For experts in FP8 activations are hi/lo FP8
(hi_lo.cuh), in the columns' usual order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.formats.experts import ExpertWeights, split_experts
from blink.formats.layouts import ExpertMatrices
from blink.formats.schemes import BF16, FP8_ROW
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.device import count_free_processors, has_warpgroups
from blink.kernels.gpu.gemm.decode_hi_lo import HI_LO, are_hi_lo, new_rows
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.moe.routing import Routes
from blink.kernels.gpu.tensor_map import encode_stages
from blink.plan.site import first_reason

MAX_ROWS = 256
_MIN_TOKENS, _MAX_TOKENS = 8, 32  # of a tile
# Up to how many rows of an expert, on average, few experts have more than such a tile: of Poisson's 2 and 3 %.
_MAX_MEANS = {8: 4, 16: 10}
_WIDE = 32  # columns of a tile: from so many on they are half as many bytes as the weights of a group
_MAX_EXPERTS, _MAX_CHUNKS = 256, 512  # grouped_gemm.cuh's
_BOX_BYTES = 128
_SHARED_BYTES = 224 << 10  # of an SM, that blocks share


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """How a GEMM is split."""

    tokens: int  # of an expert's rows, that are multiplied together: 8, 16 or 32
    groups: int  # of 64 weight rows, of a tile
    boxes: int  # of 128 bytes of a weight row, in a stage
    blocks: int  # of an SM

    def stage_k(self, itemsize: int) -> int:
        """Return the columns of a stage, of weights of so many bytes."""
        return self.boxes * _BOX_BYTES // itemsize

    def stage_bytes(self, *, hi_lo: bool) -> int:
        """Return the size of a stage of the pipeline."""
        return (64 * self.groups + self.tokens * (HI_LO if hi_lo else 1)) * self.boxes * _BOX_BYTES

    def other_bytes(self) -> int:
        """Return what a block needs beside the pipeline, and a little more."""
        return 2 * self.tokens * (64 * self.groups + 4) * 4 + _MAX_CHUNKS * 8 + 1024

    def stages(self, *, hi_lo: bool) -> int:
        """Return how many stages the pipeline has."""
        return (_SHARED_BYTES // self.blocks - self.other_bytes()) // self.stage_bytes(hi_lo=hi_lo)


def choose_config(places: int, mean: float, k: int, *, hi_lo: bool) -> GroupedGemmConfig:
    """Return the tile config of a GEMM. An expert's weights are read again for every so many rows as a tile has.

    mean: rows of an expert, on average. The preferences are those of Qwen3-30B-A3B on an H200.
    """
    tokens = _choose_tokens(places, mean, hi_lo=hi_lo)
    is_wide = tokens * (HI_LO if hi_lo else 1) >= _WIDE  # two groups share the rows, which L2 hands out half as often
    groups, blocks = (2, 1) if is_wide else (1, 2)
    return GroupedGemmConfig(tokens, groups, 2 if k % (256 if hi_lo else 128) == 0 else 1, blocks)


def _choose_tokens(places: int, mean: float, *, hi_lo: bool) -> int:
    wanted = next((tokens for tokens, most in _MAX_MEANS.items() if mean <= most), _MAX_TOKENS)
    return min(max(wanted, 16 if places > 32 and not hi_lo else _MIN_TOKENS), places)


def refuses(experts: ExpertMatrices, rows: int) -> str | None:
    """Say why the kernels do not take so many rows and some experts; None: they do."""
    encoding, count = experts.encoding, experts.experts
    if encoding not in (BF16, FP8_ROW) or experts.dtype != "bfloat16":
        return f"experts in {experts.dtype} kept otherwise than in 16 bits or FP8 with scales of rows"
    pairs = experts.count_pairs(rows)
    tokens = _choose_tokens(count_places(rows), pairs / count, hi_lo=encoding == FP8_ROW)
    return first_reason(
        {
            "no Hopper": not has_warpgroups(),
            f"more than {MAX_ROWS} rows": rows > MAX_ROWS,
            f"{count} experts": count % 2 != 0 or count > _MAX_EXPERTS,
            f"experts of {experts.hidden} x {experts.size}": experts.hidden % 128 != 0 or experts.size % 128 != 0,
            f"{pairs} rows of all experts": min(count, pairs) + pairs // tokens > _MAX_CHUNKS,
        }
    )


def describe(experts: ExpertMatrices, rows: int) -> str:
    """Return the tiles of both GEMMs, in words."""
    hi_lo, mean = experts.encoding == FP8_ROW, experts.count_pairs(rows) / experts.experts
    configs = [choose_config(count_places(rows), mean, k, hi_lo=hi_lo) for k in (experts.hidden, experts.size)]
    tiles = (f"{64 * config.groups} x {config.tokens}, {config.stages(hi_lo=hi_lo)} stages" for config in configs)
    return f"{' | '.join(tiles)} (by rule)"


def count_places(rows: int) -> int:
    """Return how many rows are kept for each expert where a batch has so many: as many, rounded up to whole tiles."""
    step = next(size for size in (_MIN_TOKENS, 16, _MAX_TOKENS) if rows <= size or size == _MAX_TOKENS)
    return -(-rows // step) * step


def gate(x: Tensor, gate_up: ExpertWeights, routes: Routes) -> Tensor:
    """Return silu(gate) * up of all experts' rows x [experts * places, k], or of hi/lo FP8 of them, which are returned.

    gate_up: [experts, 2 * n, k], gates first; routes.pairs: [experts, places].
    """
    out = new_rows(x, x.shape[-2], gate_up.shape[1] // 2, hi_lo=are_hi_lo(x))
    _launch(Output.GATE, x, gate_up, routes, out)
    return out


def multiply(x: Tensor, weight: ExpertWeights, routes: Routes, out: Tensor) -> None:
    """Write each pair's row times its expert's weight [experts, n, k] to out [pairs, n]; the rest as in gate()."""
    _launch(Output.STORE, x, weight, routes, out)


def _launch(output: Output, x: Tensor, weight: ExpertWeights, routes: Routes, out: Tensor) -> None:
    values, scales = split_experts(weight)
    num_experts, weight_rows, k = values.shape
    places, hi_lo = routes.pairs.shape[1], are_hi_lo(x)
    config = choose_config(places, len(routes.weights) / num_experts, k, hi_lo=hi_lo)
    outputs, stage_k = 64 * config.groups * out.shape[-1] // weight_rows, config.stage_k(values.itemsize)
    assert weight_rows % (64 * config.groups) == 0 and k % stage_k == 0 and hi_lo == (scales is not None)
    assert x.is_contiguous() and x.shape[-2] == num_experts * places and places % config.tokens == 0
    n, activations = out.shape[-1], x.view(-1, num_experts * places, k)  # hi/lo FP8 of them, or one
    arguments = args(
        "GroupedArgs",
        weight=encode_stages(values.view(-1, n, k), (weight_rows // n, outputs, config.boxes)),
        x=encode_stages(activations, (len(activations), config.tokens, config.boxes)),
        counts=routes.counts,
        pairs=routes.pairs,
        scales=scales,
        out=out,
        experts=num_experts,
        places=places,
        n=n,
        stages=k // stage_k,
    )
    stages = config.stages(hi_lo=hi_lo)
    sizes = (str(hi_lo).lower(), config.tokens, config.groups, config.boxes, stages, config.blocks, output.value)
    blocks = config.blocks * count_free_processors()
    launch(
        compile_kernel(f"blink::grouped_gemm<{', '.join(map(str, sizes))}>"),
        (blocks, 1),
        128 * config.groups + 32,
        arguments,
        shared_bytes=stages * config.stage_bytes(hi_lo=hi_lo) + config.other_bytes(),
    )
