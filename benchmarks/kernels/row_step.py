# SPDX-License-Identifier: Apache-2.0
"""Time steps of one row by one kernel beside those of a kernel for each product; random weights, medians of replays.

Run with: python benchmarks/kernels/row_step.py [--model llama-3-8b] [--formats bf16 fp8 int4] [--contexts 300 2000]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from unittest import mock

import torch
from decode_layer import Run, time_graph
from quantized_step import FORMATS, load, make_decoding
from torch import Tensor

from blink.kernels.gpu.decode.launch import compile_ahead
from blink.models import decode_step


def switch(run: Run, *, one_kernel: bool) -> Run:
    """Return the step by one kernel or by those of its products."""

    def run_so() -> object:
        with mock.patch.object(decode_step, "MAX_ROW_STEP_ROWS", int(one_kernel)):
            return run()

    return run_so


def compare(before: Tensor, after: Tensor) -> float:
    """Return how far the second is off, by its norm."""
    return float((after.float() - before.float()).norm() / before.float().norm())


def main() -> None:
    """Print a line for each format and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "int4"], choices=FORMATS)
    parser.add_argument("--contexts", type=int, nargs="+", default=[300])
    options = parser.parse_args()
    for form in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            decoder = load(options.model, form, Path(folder))
        for context in options.contexts:
            step = make_decoding(decoder, 1, context)
            runs = [switch(step, one_kernel=one_kernel) for one_kernel in (False, True)]
            compile_ahead(lambda runs=runs: [run() for run in runs])
            before, after = (run().clone() for run in runs)
            repeats = all(torch.equal(runs[1](), after) for _ in range(50))
            times = [time_graph(run) for run in (*runs, *runs)]
            print(
                f"{options.model} {form} context {context}: us {times[0]:.0f} and {times[2]:.0f}, by one kernel "
                f"{times[1]:.0f} and {times[3]:.0f}; off by {compare(before, after):.4f}, repeats {repeats}",
                flush=True,
            )
        del decoder, step, runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
