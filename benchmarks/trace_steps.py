# SPDX-License-Identifier: Apache-2.0
"""Say which steps an engine launches while a command loads it: how many of each size, what they take, what is between.

Reads the trace ring of a running engine often enough that few launches are missed, for as long as the command runs.

Run with: python benchmarks/trace_steps.py blink bench --request-rate 48 --duration 12
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import time

import numpy as np
from padding import padding_share

from blink.engine.geometry import graph_sizes
from blink.errors import BlinkError
from blink.region.layout import TRACE_ENTRY
from blink.region.memory import Region, open_region
from blink.region.report import only_region

_LOOK_SECONDS = 0.15
_SIZES = (0, 1, 32, 64, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 1 << 20)


def collect(ring: Region, command: list[str]) -> np.ndarray:
    """Return the launches of a region while a command runs, in order."""
    first = int(ring.trace()["step"].max(initial=0))
    parts: list[np.ndarray] = [np.zeros(0, TRACE_ENTRY)]
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(_LOOK_SECONDS)
        parts.append(ring.trace().copy())
    trace = np.sort(np.unique(np.concatenate(parts)), order="launched_ns")
    return trace[trace["step"] > first]


def report(trace: np.ndarray) -> None:
    """Print a line for each size of step: those that only decode, then those with prompts."""
    followed = np.diff(trace["step"].astype(np.int64)) == 1
    launched, retired = (trace[name].astype(np.int64) for name in ("launched_ns", "retired_ns"))
    took = (retired[1:] - launched[:-1])[followed] / 1e6
    gaps = (launched[1:] - retired[1:])[followed] / 1e3
    steps = trace[:-1][followed]
    print(f"{len(trace)} launches; {'tokens':>12}{'steps':>8}{'decoding':>10}{'ms':>8}{'all s':>8}{'then us':>9}")
    for decodes in (True, False):
        of_kind = (steps["num_tokens"] == steps["num_decode_rows"]) == decodes
        for low, high in itertools.pairwise(_SIZES):
            chosen = of_kind & (steps["num_tokens"] > low) & (steps["num_tokens"] <= high)
            if chosen.any():
                print(
                    f"{'decoding only' if decodes else 'with prompts':14}{f'up to {high}':>12}{chosen.sum():>8}"
                    f"{steps['num_decode_rows'][chosen].mean():>10.1f}{np.median(took[chosen]):>8.2f}"
                    f"{took[chosen].sum() / 1e3:>8.2f}{np.median(gaps[chosen]):>9.1f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--region", default="", help="of the engine, if several run on this machine")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what loads it")
    options = parser.parse_args()
    try:
        region = open_region(options.region or only_region(""))
        trace = collect(region, options.command)
    except BlinkError as error:
        raise SystemExit(f"trace_steps.py: {error}") from None
    report(trace)
    share = padding_share(trace, graph_sizes(region.geometry))
    print(f"padding: {share:.1%} of the tokens that steps with prompts compute")


if __name__ == "__main__":
    main()
