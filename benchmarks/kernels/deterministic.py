# SPDX-License-Identifier: Apache-2.0
"""Time the GEMMs of `--deterministic` in the shapes of a layer, beside cuBLAS and their bytes.

Those of one order are timed as in a layer, with norm, gate or residual, and with other constants of in_tiles.py for
comparison; those in chunks with each of their tiles.

A graph has the GEMMs of a gigabyte of weights, so that no cache holds them; medians of replays. Random weights.

Run with: python benchmarks/kernels/deterministic.py [--rows 1 16 32 64] [--shapes 6144x4096 4096x14336]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
from decode_layer import time_graph
from torch import Tensor

from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import in_tiles, invariant
from blink.kernels.gpu.gemm.invariant import Tile
from blink.kernels.gpu.gemm.tile_configs import Output

_BYTES = 1 << 30
_SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")  # Llama-3-8B's
_OUTPUTS = {"4096x4096": Output.ADD, "28672x4096": Output.GATE, "4096x14336": Output.ADD}
_ORDERS: dict[str, dict[str, Any]] = {  # constants of in_tiles.py
    "one order": {"INSTRUCTION": in_tiles.INSTRUCTION},
    "one order as of 32 rows": {"_CONFIG_ROWS": 32, "_TILES": (32, 64, 128)},
    "one order, MMAs of a tile": {"INSTRUCTION": 0},
}
_FEW = (Tile(16, 1, 16, 6), Tile(16, 1, 32, 5), Tile(16, 1, 64, 4), Tile(32, 1, 32, 5), Tile(32, 1, 64, 4))
_MANY = (Tile(32, 1, 64, 4), Tile(32, 2, 64, 3), Tile(32, 2, 128, 3))
_MANY_ROWS = 64  # from which on the larger tiles are timed


def main() -> None:
    """Print a table of microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=_SHAPES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 256])
    parser.add_argument("--bandwidth", type=float, default=4.5, help="of the memory, TB/s")
    options = parser.parse_args()
    for shape in options.shapes:
        outputs, size = map(int, shape.split("x"))
        weights = [
            torch.randn(outputs, size, device="cuda").bfloat16() for _ in range(max(4, _BYTES // (2 * outputs * size)))
        ]
        print(f"{shape}: {2 * outputs * size / options.bandwidth / 1e6:.1f} us of bytes", flush=True)
        for rows in options.rows:
            times = measure(torch.randn(rows, size, device="cuda").bfloat16(), weights)
            print(f"{rows:>5}  " + "  ".join(f"{name} {time:.1f}" for name, time in times.items()), flush=True)


def measure(x: Tensor, weights: list[Tensor]) -> dict[str, float]:
    """Return the microseconds of one GEMM by cuBLAS, by the chosen tile and by all others."""
    found = {"cuBLAS": run(lambda weight: functional.linear(x, weight), weights)}
    for name, constants in _ORDERS.items():
        with patch.multiple(in_tiles, **constants):
            found[name] = run(in_order(x, weights[0].shape), weights)
    found["chosen"] = run(lambda weight: invariant.multiply(x, weight), weights)
    for tile in _FEW if len(x) < _MANY_ROWS else _MANY:
        with patch.object(invariant, "choose_tile", lambda *_, tile=tile: tile):
            name = f"{tile.all_rows}x{tile.outputs}"
            found[name] = run(lambda weight: invariant.multiply(x, weight), weights)
    return found


def in_order(x: Tensor, shape: torch.Size) -> Callable[[Tensor], object]:
    """Return the GEMM of one order of a layer with a weight of some shape."""
    outputs, output = shape[0], _OUTPUTS.get(f"{shape[0]}x{shape[1]}", Output.STORE)
    tokens = in_tiles.pad(len(x), packed=False)
    normed = gemm.NormInput(x, torch.ones(64, tokens, device="cuda"))
    residual, norm = x.new_zeros(len(x), outputs), x.new_ones(outputs)
    if output is Output.ADD:
        return lambda weight: gemm.add_linear(x, weight, residual, norm, ordered=True)
    if output is Output.GATE:
        return lambda weight: gemm.gated_linear(normed, 1e-5, weight, ordered=True)
    return lambda weight: gemm.normed_linear(normed, 1e-5, weight, ordered=True)


def run(multiply: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Return the microseconds of one GEMM in a graph of many."""

    def run_all() -> None:
        for weight in weights:
            multiply(weight)

    return time_graph(run_all) / len(weights)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
