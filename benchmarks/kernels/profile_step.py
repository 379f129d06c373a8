# SPDX-License-Identifier: Apache-2.0
"""Say where the time of a step goes: from the end of each kernel to that of the next, summed up by the kernels' names.

Kernels overlap, so their durations add up to more than the step; the times between their ends add up to it. A bundled
model, random weights; replays of a graph under PyTorch's profiler, which slows each kernel a little.

Run with: python benchmarks/kernels/profile_step.py [--model llama-3-8b] [--formats bf16] [--rows 1] [--prompts 128]
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from decode_layer import Run, time_graph
from quantized_step import FORMATS, load, make_decoding, make_prompt
from torch.profiler import ProfilerActivity, profile

from blink.kernels.gpu.launch import compile_ahead

_REPLAYS = 4


def record_kernels(run: Run) -> list[dict[str, Any]]:
    """Return the kernels of some replays of what `run` launches, by their ends in microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "kernel"), key=end_of)


def end_of(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def short_name(name: str) -> str:
    """Return a kernel's name without namespace and template arguments."""
    found = re.match(r"(?:void )?(?:\w+::)*(\w+)", name)
    return found[1] if found else name


def report(kernels: list[dict[str, Any]]) -> None:
    """Print the kernels that take the most of a step; the first replay, which nothing overlaps, is left out."""
    times, counts = defaultdict[str, float](float), Counter[str]()
    for before, kernel in itertools.pairwise(kernels[len(kernels) // _REPLAYS :]):
        name = short_name(kernel["name"])
        times[name] += end_of(kernel) - end_of(before)
        counts[name] += 1
    for name, total in sorted(times.items(), key=lambda item: -item[1])[:12]:
        each, number = total / counts[name], counts[name] / (_REPLAYS - 1)
        print(f"   {name:44} {each:8.2f} us, {number:5.1f} times: {total / (_REPLAYS - 1):8.1f}", flush=True)


def main() -> None:
    """Print a table for each format and size of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--formats", nargs="+", default=["bf16"], choices=FORMATS)
    parser.add_argument("--rows", type=int, nargs="*", default=[1])
    parser.add_argument("--prompts", type=int, nargs="*", default=[])
    parser.add_argument("--context", type=int, default=300)
    options = parser.parse_args()
    for form in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            decoder = load(options.model, form, Path(folder))
        runs = {f"{rows} rows": make_decoding(decoder, rows, options.context) for rows in options.rows}
        runs |= {f"a prompt of {tokens} tokens": make_prompt(decoder, tokens) for tokens in options.prompts}
        compile_ahead(lambda runs=runs: [run() for run in runs.values()])
        for name, run in runs.items():
            print(f"{options.model}, {form}, {name}: {time_graph(run):.0f} us", flush=True)
            report(record_kernels(run))
        del decoder, runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
