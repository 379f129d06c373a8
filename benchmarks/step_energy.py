# SPDX-License-Identifier: Apache-2.0
"""Joules of a decode step and of a token at fixed rows, and where they go.

The GPU's power is measured first without a process, with a context, with one spinning thread, and while a kernel reads
as many bytes as a step reads of weights. Then an engine with random weights idles, and decodes at each number of rows.
A step's joules are those of these parts for as long as the step takes, and the rest: what its kernels compute, and
write, and wait for. Clocks and limits of power stay as they are. Nothing else may use the GPU. With the defaults it
takes less than three minutes on an H100.

`--output` writes a file of benchmarks/results.
Run with: python benchmarks/step_energy.py src/blink/models/configs/llama-3-8b [--output FILE.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from dummy_engine import run_engine
from gauge import Gauge
from gpu_decode import find_gauge, make_model, make_parser, run_batch
from gpu_occupants import CONTEXT, SPINNER, make_reader, measure_occupant
from step_bytes import cache_bytes, weight_bytes

import blink
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec

ITEM_BYTES = 2  # bfloat16
PARTS = ("board without a process", "context", "resident scheduler", "reading weights", "reading the KV cache", "rest")


@dataclass(frozen=True, slots=True)
class Idle:
    """Watts of a GPU on which nothing is computed, by what is resident."""

    nothing: float
    context: float
    scheduler: float  # Blink's, without requests


@dataclass(frozen=True, slots=True)
class Reading:
    """A kernel that only reads."""

    num_bytes: float  # of a pass
    seconds: float
    watts: float

    def joules_per_byte(self, context_watts: float) -> float:
        """Return what a byte takes beyond the watts of a context."""
        return (self.watts - context_watts) * self.seconds / self.num_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step, and what it must read."""

    rows: int
    seconds: float
    watts: float
    sm_mhz: float
    weight_bytes: float
    kv_bytes: float

    @property
    def joules(self) -> float:
        """The energy of one step."""
        return self.watts * self.seconds


def split_joules(step: Step, idle: Idle, reading: Reading) -> dict[str, float]:
    """Return the joules of a step by PARTS; their sum is the step's."""
    per_byte = reading.joules_per_byte(idle.context)
    known = (
        idle.nothing * step.seconds,
        (idle.context - idle.nothing) * step.seconds,
        (idle.scheduler - idle.context) * step.seconds,
        per_byte * step.weight_bytes,
        per_byte * step.kv_bytes,
    )
    return dict(zip(PARTS, (*known, step.joules - sum(known)), strict=True))


def measure_steps(gauge: Gauge, spec: ModelSpec, options: argparse.Namespace) -> tuple[dict[str, float], list[Step]]:
    """Return what an engine takes without requests, and its steps: the median run of each number of rows."""
    with run_engine(make_model(options), device="cuda", num_blocks=options.num_blocks) as (client, _):
        run_batch(client, 1, options)
        time.sleep(options.settle)
        idle = gauge.measure(options.seconds)
        steps: list[Step] = []
        for rows in options.rows:
            windows = [run_batch(client, rows, options, gauge) for _ in range(options.repeats)]
            windows.sort(key=lambda window: window.gauge["watts"] * window.tpot_ms)
            window = windows[len(windows) // 2]
            weights = weight_bytes(spec, rows, ITEM_BYTES, options.quantization)
            kv = cache_bytes(spec, rows, window.context, ITEM_BYTES if options.kv_cache_dtype == "auto" else 1)
            steps.append(Step(rows, window.tpot_ms / 1e3, window.gauge["watts"], window.gauge["sm_mhz"], weights, kv))
    return idle, steps


def make_tables(
    found: dict[str, dict[str, float]], steps: list[Step], reading: Reading, splits: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Return the tables of a result."""
    columns = [f"{step.rows} row{'s' if step.rows > 1 else ''}" for step in steps]
    return [
        {
            "title": "Energy at fixed rows",
            "columns": ["rows", "TPOT ms", "W", "MHz", "J per step", "J/token"],
            "rows": [
                [
                    step.rows,
                    round(step.seconds * 1e3, 3),
                    round(step.watts),
                    round(step.sm_mhz),
                    round(step.joules, 3),
                    round(step.joules / step.rows, 4),
                ]
                for step in steps
            ],
        },
        {
            "title": "Where the joules of a step go, J per step",
            "columns": ["part", *columns],
            "rows": [[part, *(round(split[part], 3) for split in splits)] for part in PARTS],
        },
        {
            "title": "Power without steps",
            "columns": ["what is resident", "W", "MHz"],
            "rows": [[name, round(one["watts"], 1), round(one["sm_mhz"])] for name, one in found.items()],
        },
        {
            "title": "A kernel that only reads",
            "columns": ["GB", "ms", "W", "TB/s", "J per pass"],
            "rows": [
                [
                    round(reading.num_bytes / 1e9, 2),
                    round(reading.seconds * 1e3, 3),
                    round(reading.watts),
                    round(reading.num_bytes / reading.seconds / 1e12, 2),
                    round(reading.watts * reading.seconds, 3),
                ]
            ],
        },
    ]


def make_result(tables: list[dict[str, Any]], gpu: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a file of benchmarks/results (result_files.py)."""
    return {
        "title": "Where the joules of a decode step go",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"one {gpu}",
        "versions": {"torch": torch.__version__, "Blink": blink.__version__},
        "settings": [
            f"the shape of {options.model.name}, {'bf16' if options.quantization == 'auto' else options.quantization}",
            "random weights",
            f"N equal streams of {options.prompt_tokens} prompt tokens and {options.new_tokens} tokens that count",
            "clocks and limits of power as they were",
        ],
        "commands": [shlex.join(["python", *sys.argv])],
        "runs": f"medians of {options.repeats}; power without steps: one run",
        "raw_data": "not kept",
        "tables": tables,
    }


def print_table(table: dict[str, Any]) -> None:
    """Print a result's table."""
    lines = [[str(cell) for cell in row] for row in (table["columns"], *table["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{table['title']}")
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]))


def read_options() -> argparse.Namespace:
    """Return the options: those of gpu_decode.py, and of what is measured without steps."""
    parser = make_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement without steps")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before each of them")
    parser.set_defaults(rows=[1, 8, 32, 64], new_tokens=800)
    return parser.parse_args()


def main() -> None:
    """Print the tables."""
    options = read_options()
    spec, gauge = read_spec(options.model), find_gauge()
    if gauge is None or options.device != "cuda":
        raise SystemExit("step_energy.py: needs a GPU whose driver counts its energy")
    time.sleep(options.settle)
    found = {"nothing": gauge.measure(options.seconds)}
    for occupant in (CONTEXT, SPINNER):
        found[occupant.name] = measure_occupant(gauge, occupant, options.seconds, options.settle)
    num_bytes = round(weight_bytes(spec, max(options.rows), ITEM_BYTES, options.quantization))
    read = measure_occupant(gauge, make_reader(num_bytes), options.seconds, options.settle)
    reading = Reading(num_bytes, read["pass_seconds"], read["watts"])
    found["Blink without requests"], steps = measure_steps(gauge, spec, options)
    idle = Idle(*(found[name]["watts"] for name in ("nothing", CONTEXT.name, "Blink without requests")))
    tables = make_tables(found, steps, reading, [split_joules(step, idle, reading) for step in steps])
    for table in tables:
        print_table(table)
    if options.output:
        options.output.write_text(json.dumps(make_result(tables, gauge.name, options), indent=2) + "\n")


if __name__ == "__main__":
    main()
