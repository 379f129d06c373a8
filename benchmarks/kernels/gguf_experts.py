# SPDX-License-Identifier: Apache-2.0
"""Times both grouped GEMMs with experts in GGUF's formats, of Qwen3.6-35B-A3B's shape, in several tiles.

Beside each time stand the bytes of the chosen experts over the time. With --every all tiles are printed, else the one
that serving takes, and the best.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator

import torch
import triton
from median import median_us

from blink.formats.gguf import GgufRows
from blink.formats.gguf_experts import GgufExperts, pack_experts
from blink.formats.schemes import FormatId
from blink.kernels.gpu.moe.grouped_gguf import (
    GgufExpertTiling,
    choose_gguf_expert_tiling,
    multiply_gguf_experts,
)
from blink.kernels.gpu.moe.routing import Routes, route
from blink.models.weights.dummy_gguf import draw_blocks

_EXPERTS, _TOP_K, _HIDDEN, _SIZE = 256, 8, 2048, 512
_DEVICE = torch.device("cuda")


def draw_experts(format: FormatId, heights: tuple[int, ...], columns: int) -> GgufExperts:
    """Return random experts, of a part for each height."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    experts = (
        [GgufRows(format.ggml, draw_blocks(format.ggml, height, columns, generator)) for height in heights]
        for _ in range(_EXPERTS)
    )
    allocate = functools.partial(torch.empty, device=_DEVICE)
    return pack_experts(experts, (_EXPERTS, sum(heights), columns), allocate, _DEVICE)


def list_tilings(rows: int, columns: int) -> Iterator[GgufExpertTiling]:
    """Yield tiles that may suit so many rows."""
    some_rows = (16, 32) if rows * _TOP_K < 16 * _EXPERTS else (32, 64, 128)
    for sizes in itertools.product(some_rows, (16, 32, 64, 128), (1, 2, 4), (1, 2, 4, 8), (2, 3, 4)):
        rows_block, wide, _, num_warps, _ = sizes
        if columns % wide == 0 and 64 <= rows_block * wide // num_warps <= 4096:
            yield GgufExpertTiling(*sizes)


def time_tiling(
    experts: GgufExperts, routes: Routes, rows: int, tiling: GgufExpertTiling | None, *, is_gated: bool
) -> float:
    """Return microseconds of one GEMM; infinity where the compiler refuses the tile."""
    pairs, depth = rows * _TOP_K, experts.shape[2]
    x = torch.randn(rows if is_gated else pairs, depth, device=_DEVICE).bfloat16()
    result = torch.empty(pairs, experts.shape[1] // (1 + is_gated), device=_DEVICE, dtype=torch.bfloat16)

    def call() -> None:
        multiply_gguf_experts(
            x, experts, routes, result,
            pairs_per_row=_TOP_K if is_gated else 1, activation="silu" if is_gated else None, tiling=tiling,
        )  # fmt: skip

    try:
        return median_us(call, rep=5)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 2048])
    parser.add_argument("--formats", nargs="+", default=["Q4_K", "Q6_K"])
    parser.add_argument("--every", action="store_true")
    options = parser.parse_args()
    for name, is_gated in itertools.product(options.formats, (True, False)):
        heights, columns = ((_SIZE, _SIZE), _HIDDEN) if is_gated else ((_HIDDEN,), _SIZE)
        experts = draw_experts(FormatId[name], heights, columns)
        for rows in options.rows:
            logits = torch.randn(rows, _EXPERTS, device=_DEVICE).bfloat16()
            routes = route(logits, torch.tensor([rows], dtype=torch.int32, device=_DEVICE), _TOP_K)
            num_bytes = int((routes.counts > 0).sum()) * experts.nbytes / _EXPERTS
            width = experts.shape[1] // len(heights)
            chosen = choose_gguf_expert_tiling(rows * _TOP_K, _EXPERTS, width, is_gated=is_gated)
            time_one = functools.partial(time_tiling, experts, routes, rows, is_gated=is_gated)
            times = {tiling: time_one(tiling=tiling) for tiling in list_tilings(rows, width)} if options.every else {}
            best = min(times, key=lambda tiling: times[tiling], default=chosen)
            us, least = time_one(tiling=chosen), times.get(best, 0.0)
            print(f"{name} {'gate' if is_gated else 'down'} {rows:5} rows {us:8.2f} us {num_bytes / us / 1e6:5.2f} TB/s"
                  f" {chosen} | best {least:8.2f} {best}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
