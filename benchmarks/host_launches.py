# SPDX-License-Identifier: Apache-2.0
"""What the scheduler adds to a step: decode steps launched by the host, then the same by the scheduler, in one boot.

Before it starts its scheduler the engine launches the very executables that this will launch, behind as many prompts,
with contexts that grow alike: both find the GPU's clock as it is under such load. Needs a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from dummy_engine import run_engine
from gpu_decode import make_model, make_parser, measure, run_batch

from blink.config import EngineConfig
from blink.engine.costs import clear_step, describe_step
from blink.engine.geometry import graph_sizes
from blink.engine.gpu import GpuEngine
from blink.models.weights.source import read_spec

_PROMPT_STEP = 2048  # tokens, as the engine's default


class HostedEngine(GpuEngine):
    """Launches decode steps from the host before it starts the scheduler."""

    def __init__(self, config: EngineConfig, options: argparse.Namespace) -> None:
        self._options = options
        self.host_us: dict[int, float] = {}  # of a step, the median of all repeats
        super().__init__(config)

    def _start(self) -> None:
        for layer in self._kv_cache:
            layer.cells.normal_()
        for rows in self._options.rows:
            self.host_us[rows] = statistics.median(self._launch_batch(rows) for _ in range(self._options.repeats))
        clear_step(self._batch)
        torch.cuda.synchronize()
        super()._start()

    def _launch_batch(self, rows: int) -> float:
        """Return the mean microseconds of so many rows' steps, over as many as are measured of the scheduler."""
        options, sizes = self._options, graph_sizes(self._geometry)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._scheduler.stream):
            self._launch_prompts(rows * options.prompt_tokens)
            index = next(i for i, size in enumerate(sizes) if size[1] >= rows)
            self._describe_rows(rows, options.prompt_tokens + 1)
            for step in range(1 + options.new_tokens):
                if step == 1:
                    begin.record()
                self._scheduler.launch(index)
                self._batch.positions[:rows].add_(1)
                self._batch.context_lens[:rows].add_(1)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / options.new_tokens

    def _launch_prompts(self, tokens: int) -> None:
        sizes, first = graph_sizes(self._geometry), int(self._geometry["num_decode_graphs"])
        index = next(i for i, size in enumerate(sizes) if i >= first and size[0] >= min(tokens, _PROMPT_STEP))
        describe_step(self._batch, self._geometry, *sizes[index], decoding=False, context=0)
        for _ in range(math.ceil(tokens / sizes[index][0])):
            self._scheduler.launch(index)

    def _describe_rows(self, rows: int, context: int) -> None:
        """Describe decoding rows with so many tokens each, which write theirs."""
        batch, block_size = self._batch, int(self._geometry["block_size"])
        describe_step(batch, self._geometry, rows, rows, decoding=True, context=context - 1)
        last = batch.block_tables[:rows, (context - 1) // block_size]
        batch.kv_slots[:rows] = last * block_size + (context - 1) % block_size


def main() -> None:
    """Print a line for each number of rows."""
    options = make_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU, whose steps this measures")
    spec, engines = read_spec(options.model), list[HostedEngine]()

    def create(config: EngineConfig) -> HostedEngine:
        engines.append(HostedEngine(config, options))
        return engines[0]

    context = options.prompt_tokens + 1 + options.new_tokens / 2
    heads = ("rows", "host us", "context", "scheduler us", "context", "more %", "W", "MHz")
    print("".join(f"{head:>13}" for head in heads))
    with run_engine(make_model(options), device="cuda", num_blocks=options.num_blocks, create=create) as engine:
        client, region = engine
        run_batch(client, 1, options)
        for rows in options.rows:
            served, host = measure(client, region, spec, rows, options), engines[0].host_us[rows]
            us = served["tpot_ms"] * 1e3
            figures = (host, context, us, served["context"], us / host * 100 - 100, served["watts"], served["sm_mhz"])
            print(f"{rows:>13}" + "".join(f"{figure:>13.1f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
