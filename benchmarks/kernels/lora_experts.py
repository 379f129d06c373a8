# SPDX-License-Identifier: Apache-2.0
"""Time a layer's experts with LoRA adapters against those without, in the shape of Qwen3-30B-A3B, in BF16.

Each is a graph; medians of replays. Weights and tokens are random, and the tokens have the adapters in turn. `gated` is
the mixture of an engine without adapters of experts. `none` is the mixture of a graph for adapters with none in its
rows: what it pays for the other GEMMs and the looking. Kernels for few pairs and for many are timed apart.

Run with: python benchmarks/kernels/lora_experts.py [--tokens 1 8 32 256 2048] [--adapters 8] [--rank 16]
"""

from __future__ import annotations

import argparse
import functools

import torch
from decode_layer import draw, time_graph
from torch import Tensor

from blink.kernels.gpu.lora import experts as lora_experts
from blink.kernels.gpu.lora.memory import GpuAdapters, GpuUpdates
from blink.kernels.gpu.lora.paging import copy_ordered
from blink.kernels.gpu.moe.grouped import moe
from blink.kernels.lora import LowRank, WeightParts

EXPERTS, HIDDEN, SIZE, TOP_K = 128, 2048, 768, 8


class Experts:
    """A layer's experts with adapters in GPU memory."""

    def __init__(self, count: int, rank: int) -> None:
        self.weights = draw(EXPERTS, 2 * SIZE, HIDDEN), draw(EXPERTS, HIDDEN, SIZE)
        rows = ((slice(0, SIZE), slice(SIZE, 2 * SIZE)), (slice(0, HIDDEN),))
        shapes = ((2 * SIZE, HIDDEN), (HIDDEN, SIZE))
        parts = {
            id(weight): WeightParts(shape, own, EXPERTS)
            for weight, shape, own in zip(self.weights, shapes, rows, strict=True)
        }
        self.adapters = GpuAdapters(parts, count, count, rank, torch.empty(0, dtype=torch.bfloat16, device="cuda"))
        updates = {key: [draw_update(each, own, rank) for own in each.rows] for key, each in parts.items()}
        for index in range(count):  # of equal contents: what is read is as much
            self.adapters.put(index, updates)
            order = torch.tensor([index, index, 1, 0], dtype=torch.int32, device="cuda")
            copy_ordered([self.adapters.places], order)

    def mix(self, x: Tensor, logits: Tensor, num_tokens: Tensor, places: Tensor | None) -> Tensor:
        """Return the mixture of rows; places: of tokens' adapters, None for the gated kernel."""
        updates = None if places is None else GpuUpdates(self.adapters.stacks, places)
        return moe(x, logits, *self.weights, num_tokens, top_k=TOP_K, renormalize=True, updates=updates)


def draw_update(parts: WeightParts, rows: slice, rank: int) -> LowRank:
    """Return a random update of one matrix of each expert."""
    return LowRank(rows, draw(EXPERTS, rank, parts.shape[1]), draw(EXPERTS, rows.stop - rows.start, rank))


def report(layer: Experts, tokens: int, count: int) -> None:
    """Print the microseconds of each kind, and what adapters cost."""
    x, logits = draw(tokens, HIDDEN), draw(tokens, EXPERTS)
    num_tokens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    none = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    run = functools.partial(layer.mix, x, logits, num_tokens)
    gated, empty = time_graph(lambda: run(None)), time_graph(lambda: run(none))
    found = [f"{tokens:5} tokens: gated {gated:8.1f} us, none {empty:8.1f}"]
    own = (torch.arange(tokens, device="cuda") % count + 1).int()
    for name, most in (("few", 1 << 30), ("many", 0)):
        lora_experts.MOST_PAIRS = most
        if name == "few" and tokens * TOP_K > 4096:
            continue
        found.append(f"{count} adapters by the kernels of {name} {time_graph(lambda: run(own)):8.1f}")
    print(", ".join(found), flush=True)


def main() -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 256, 2048])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    layer = Experts(options.adapters, options.rank)
    print(f"{layer.adapters.nbytes / options.adapters / 1e6:.1f} MB of a layer's experts by adapter")
    for tokens in options.tokens:
        report(layer, tokens, options.adapters)


if __name__ == "__main__":
    main()
