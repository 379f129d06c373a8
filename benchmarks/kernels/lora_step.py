# SPDX-License-Identifier: Apache-2.0
"""Time decode steps of a bundled model with LoRA adapters against steps without; random weights in 16 bits.

Each step is a graph; medians of replays. The rows have the adapters in turn, which change all matrices of attention and
MLP. `flag off` is the step of an engine without `--enable-lora`, `base` that of one with it and no adapter in the step.
`no adapter` is the graph for adapters with none in its rows: what a step pays for the other GEMMs and the looking.
The last lines compare with the limits.

Run with: python benchmarks/kernels/lora_step.py [--model llama-3-8b] [--rows 1 8 32] [--adapters 8] [--rank 16]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path

import torch
from decode_layer import BLOCK_SIZE, Run, make_batch, time_graph
from quantized_step import load

from blink.adapters.modules import find_weights
from blink.kernels.batch import Batch, Param
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.lora.memory import GpuAdapters
from blink.kernels.gpu.lora.paging import copy_ordered
from blink.kernels.lora import LowRank, WeightParts
from blink.models.decoder import Decoder
from blink.plan.site import Bucket
from blink.runner.run import Runner

REPLAYS = 99
FLAG_LIMIT = 1.005  # of a step without adapters, times that of an engine without the flag
ADAPTERS_LIMIT = 1.08  # of a step of 32 rows with 8 adapters of rank 16, times that without


def make_adapters(decoder: Decoder, count: int, rank: int) -> GpuAdapters:
    """Return the memory of so many adapters with random entries."""
    like = torch.empty(0, dtype=decoder.dtype, device=decoder.device)
    weights, draw = find_weights(decoder), torch.Generator().manual_seed(0)
    adapters = GpuAdapters(weights, count, count, rank, like)
    updates = {key: [draw_update(parts, rows, rank, draw) for rows in parts.rows] for key, parts in weights.items()}
    for index in range(count):  # of equal contents: what a step reads is as much
        adapters.put(index, updates)
        order = torch.tensor([index, index, 1, 0], dtype=torch.int32, device=decoder.device)
        copy_ordered([adapters.places], order)
    return adapters


def draw_update(parts: WeightParts, rows: slice, rank: int, draw: torch.Generator) -> LowRank:
    """Return a random update of one matrix."""
    down = torch.randn(rank, parts.shape[1], generator=draw).mul_(0.02)
    return LowRank(rows, down, torch.randn(rows.stop - rows.start, rank, generator=draw).mul_(0.02))


def with_adapters(batch: Batch, rows: int, count: int) -> Batch:
    """Let the rows of a step have so many adapters in turn."""
    batch.params[:rows, Param.ADAPTER] = (torch.arange(rows) % count + 1).int().to(batch.params.device)
    return batch


def make_runs(decoder: Decoder, adapters: GpuAdapters, rows: int, counts: list[int], context: int) -> dict[str, Run]:
    """Return the steps of so many rows, by their names."""
    blocks = -(-context // BLOCK_SIZE)
    cache, plain, runner = decoder.allocate_kv_cache(rows * blocks, BLOCK_SIZE), Runner(decoder), Runner(decoder)
    runner.find_updates = adapters.find

    def run(batch: Batch, *, adapters: bool, runner: Runner = runner) -> None:
        runner.compute_logits(batch, cache, Bucket(rows, rows, decoding=True, adapters=adapters))

    def make() -> Batch:
        return make_batch(rows, context, blocks, decoder.spec.vocab_size)

    runs: dict[str, Run] = {"flag off": functools.partial(run, make(), adapters=False, runner=plain)}
    runs["base"] = functools.partial(run, make(), adapters=False)
    runs["no adapter"] = functools.partial(run, make(), adapters=True)
    for count in counts:
        runs[f"{count} adapters"] = functools.partial(run, with_adapters(make(), rows, count), adapters=True)
    return runs


def time_copies(adapters: GpuAdapters, order: torch.Tensor) -> float:
    """Return the milliseconds in which an adapter is copied to a slot."""

    def run() -> None:
        order[2] += 1
        copy_ordered([adapters.places], order)

    run()
    return time_graph(run) / 1e3


def compare(rows: int, times: dict[str, float], many: str) -> None:
    """Print the ratios that have limits."""
    for name, base, limit in (("base", "flag off", FLAG_LIMIT), (many, "base", ADAPTERS_LIMIT)):
        ratio = times[name] / times[base]
        print(f"{rows:>4} rows: {name} / {base} {ratio:.4f}, at most {limit}: {'yes' if ratio <= limit else 'NO'}")


def main() -> None:
    """Print a table of milliseconds, and times the base's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        decoder = load(options.model, "bf16", Path(folder))
        adapters = make_adapters(decoder, options.adapters, options.rank)
        order = torch.tensor([0, 0, 1, 0], dtype=torch.int32, device=decoder.device)
        size = adapters.nbytes / options.adapters / 1e6
        print(f"a copy of {size:.0f} MB to a slot: {time_copies(adapters, order):.3f} ms")
        for rows in options.rows:
            runs = make_runs(decoder, adapters, rows, [1, options.adapters], options.context)
            with autotuner.tuning(Path(folder) / "products.json"):
                for run in runs.values():
                    run()
            times = {name: time_graph(run, REPLAYS) / 1e3 for name, run in runs.items()}
            shown = (f"{name} {time:.3f} ({time / times['base']:.3f}x)" for name, time in times.items())
            print(f"{rows:>4} rows, ms: " + ", ".join(shown), flush=True)
            compare(rows, times, f"{options.adapters} adapters")


if __name__ == "__main__":
    main()
