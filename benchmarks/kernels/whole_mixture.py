# SPDX-License-Identifier: Apache-2.0
"""Times a mixture of experts of few tokens with the expert of all tokens, in the shape of GLM-4.7-Flash, in bfloat16.

Before: rows are copied to experts, and the one of all tokens has GEMVs of its own. After: two kernels. Medians of CUDA
graphs over several layers, next to the bytes of the experts that the tokens have; in two calls, the other one first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from recurrent_layers import time_graph
from torch import Tensor

from blink.kernels.gpu.gemm import few_rows
from blink.kernels.gpu.moe import few_tokens, permuted_experts
from blink.kernels.shared_expert import add_shared_expert

EXPERTS, TOP_K, HIDDEN, SIZE = 64, 4, 2048, 1536
_LAYERS = 8


class Layer(NamedTuple):
    """A layer's matrices, and what its router has chosen."""

    experts: tuple[Tensor, Tensor]
    shared: tuple[Tensor, Tensor]
    ranks: Tensor
    weights: Tensor


def draw_layer(tokens: int) -> Layer:
    """Return random matrices and random experts of each token."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    ranks = torch.full((tokens, EXPERTS), -torch.inf, device="cuda", dtype=torch.bfloat16)
    for row in ranks:
        row[torch.randperm(EXPERTS, device="cuda")[:TOP_K]] = -torch.arange(TOP_K, device="cuda").bfloat16()
    experts = draw(EXPERTS, 2 * SIZE, HIDDEN), draw(EXPERTS, HIDDEN, SIZE)
    shared = draw(2 * SIZE, HIDDEN), draw(HIDDEN, SIZE)
    return Layer(experts, shared, ranks, torch.rand(tokens, TOP_K, device="cuda"))


def run_before(x: Tensor, num_tokens: Tensor, layer: Layer) -> Tensor:
    """Copy rows to experts, and add the expert of all tokens."""
    found = permuted_experts.moe(
        x, layer.ranks, layer.experts, num_tokens, top_k=TOP_K, renormalize=False, weights=layer.weights
    )
    inner = few_rows.GATED_GEMV.multiply(x, layer.shared[0])
    return add_shared_expert(found, few_rows.GEMV.multiply(inner, layer.shared[1], None), x, None)


def run_after(x: Tensor, num_tokens: Tensor, layer: Layer) -> Tensor:
    """Compute both by two kernels."""
    return few_tokens.mix(x, layer.ranks, layer.weights, layer.experts, layer.shared, num_tokens)


def time_tokens(tokens: int) -> None:
    """Print how long both take, and by how much they differ."""
    layers = [draw_layer(tokens) for _ in range(_LAYERS)]
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    num_tokens = torch.tensor([tokens], dtype=torch.int32, device="cuda")

    def measure(run: Callable[[Tensor, Tensor, Layer], Tensor]) -> float:
        return time_graph([partial(run, x, num_tokens, layer) for layer in layers])

    before, after = run_before(x, num_tokens, layers[0]).float(), run_after(x, num_tokens, layers[0]).float()
    differs = float((before - after).abs().max() / before.abs().max())
    rounds = [[measure(run) for run in order] for order in ((run_before, run_after), (run_after, run_before))]
    old, new = min(rounds[0][0], rounds[1][1]), min(rounds[0][1], rounds[1][0])
    chosen = sum(int((layer.ranks > -torch.inf).any(0).sum()) for layer in layers) / _LAYERS
    moved = (chosen + 1) * 3 * HIDDEN * SIZE * 2
    print(
        f"{tokens} tokens   before {old:7.2f} us {moved / old / 1e6:5.2f} TB/s   after {new:7.2f} us "
        f"{moved / new / 1e6:5.2f} TB/s   {old / new:5.2f} times as fast   differ by {differs:.4f}",
        flush=True,
    )


def main() -> None:
    """Time what the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    for tokens in parser.parse_args().tokens:
        time_tokens(tokens)


if __name__ == "__main__":
    main()
