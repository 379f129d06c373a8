# SPDX-License-Identifier: Apache-2.0
"""Time silu(gate) * up of weights of 16 bits in every way that the server chooses from, beside their bytes' time.

A graph has the GEMMs of a gigabyte of weights, so that no cache holds them; medians of replays. cuBLAS takes the
algorithm that was chosen, and the activation is a kernel behind it. Random weights.

Run with: python benchmarks/kernels/gate_up.py [--shape 28672 4096] [--tokens 96 128 160 192 224 256]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from decode_layer import time_graph
from torch import Tensor

from blink.kernels.gpu import autotuner
from blink.kernels.gpu.gemm.fused_gate_up import list_candidates
from blink.kernels.gpu.launch import compile_ahead

_BYTES = 1 << 30


def main() -> None:
    """Print a table of microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=[28672, 4096], metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[96, 128, 160, 192, 224, 256])
    parser.add_argument("--bandwidth", type=float, default=3.0, help="of the memory, TB/s")
    options = parser.parse_args()
    size = options.shape[0] * options.shape[1]
    weights = [torch.randn(options.shape, device="cuda").bfloat16() for _ in range(max(4, _BYTES // (2 * size)))]
    print(f"{2 * size / options.bandwidth / 1e6:.1f} us of bytes", flush=True)
    for tokens in options.tokens:
        x = torch.randn(tokens, options.shape[1], device="cuda").bfloat16()
        compile_ahead(lambda x=x: [way() for way in list_candidates(x, weights[0]).values()])
        with tempfile.TemporaryDirectory() as folder, autotuner.tuning(Path(folder) / "products.json"):
            codes = tuple(list_candidates(x, weights[0]))
            run_all(codes[0], x, weights)
        times = [time_graph(lambda code=code, x=x: run_all(code, x, weights)) / len(weights) for code in codes]
        print(
            f"{tokens:>4} " + "".join(f"  {code} {time:.1f}" for code, time in zip(codes, times, strict=True)),
            flush=True,
        )


def run_all(code: str, x: Tensor, weights: list[Tensor]) -> None:
    """Compute the GEMMs of all weights in one way."""
    for weight in weights:
        list_candidates(x, weight)[code]()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
