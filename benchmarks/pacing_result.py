# SPDX-License-Identifier: Apache-2.0
"""What is made of the runs of pacing.py: the tables of results/DATE-MACHINE/pacing.json, and the curve of its figures.

The runs are the files pacing-runs*.json beside it, as `pacing.py --output` writes them. make_results.py calls this.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from blink.bench.plot import Series, draw_chart
from result_files import RESULTS, ROOT, Result, Table

PACING: Final = RESULTS / "2026-11-27-h100" / "pacing.json"
CURVE: Final = ROOT / "docs" / "images" / "energy-curve.svg"
# Columns of figures, their names in a run, and how many digits a figure keeps after the point.
_FIGURES: Final = (
    ("J/token", "joules_per_token", 4),
    ("W", "mean_power_w", 0),
    ("TTFT p50 ms", "p50_ttft_ms", 2),
    ("TTFT p99 ms", "p99_ttft_ms", 1),
    ("TPOT p50 ms", "p50_tpot_ms", 2),
    ("TPOT p99 ms", "p99_tpot_ms", 2),
    ("ITL p99 ms", "p99_itl_ms", 2),
    ("time held %", "held_percent", 1),
)
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")

Runs = dict[tuple[float, float], list[dict[str, float]]]  # by requests per second and target in ms


def read_runs(folder: Path) -> Runs:
    """Return all runs of a folder, ascending."""
    found: Runs = defaultdict(list)
    for path in sorted(folder.glob("pacing-runs*.json")):
        for row in json.loads(path.read_text()):
            found[row["rate"], row["target_ms"]] += row["runs"]
    return dict(sorted(found.items()))


def make_pacing(path: Path = PACING) -> str:
    """Return the text of pacing.json: its own head, and the tables of the runs beside it."""
    head: dict[str, Any] = json.loads(path.read_text())
    found = read_runs(path.parent)
    columns = ["req/s", "TPOT target ms", "runs", *(name for name, *_ in _FIGURES), "J/token, of no target"]
    table = {"title": "Energy and latency by target (0: none)", "columns": columns, "rows": []}
    lines = [f"        [{', '.join(_describe(found, rate, target))}]" for rate, target in found]
    text = json.dumps(head | {"tables": [table]}, indent=2)
    return text.replace('"rows": []', '"rows": [\n' + ",\n".join(lines) + "\n      ]") + "\n"


def format_curve(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of joules per token: a row for each target, a column for each load."""
    table = result.tables[0]
    rates, targets = (sorted({float(row[i] or 0) for row in table.rows}) for i in (0, 1))
    cells = {(float(row[0] or 0), float(row[1] or 0)): _show(table, row) for row in table.rows}
    rows = [
        [f"{target:g}" if target else "none", *(cells.get((rate, target), "") for rate in rates)] for target in targets
    ]
    return ["target, ms", *(f"{rate:g} req/s" for rate in rates)], rows


def draw_curve(result: Result) -> str:
    """Return joules per token by target as an SVG document, a line for each load."""
    table = result.tables[0]
    place = table.columns.index("J/token")
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in table.rows:
        points[f"{row[0]} requests/s"].append((float(row[1] or 0), float(row[place] or 0)))
    series = [Series(name, colour, False, line) for (name, line), colour in zip(points.items(), _COLOURS, strict=False)]
    x_title = "target of time per output token, ms (0: none)"
    return draw_chart("Energy per output token", x_title, "joules per token", series) + "\n"


def _describe(found: Runs, rate: float, target: float) -> list[str]:
    """Return a row's numbers with all of their digits: medians, and the energy in proportion to that of no target."""
    runs, unpaced = found[rate, target], found.get((rate, 0))
    medians = [f"{_median(runs, name):.{digits}f}" for _, name, digits in _FIGURES]
    energy = _FIGURES[0][1]
    ratio = f"{_median(runs, energy) / _median(unpaced, energy):.3f}" if unpaced else "null"
    return [f"{rate:g}", f"{target:g}", str(len(runs)), *medians, ratio]


def _median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def _show(table: Table, row: list[Any]) -> str:
    found = dict(zip(table.columns, row, strict=True))
    return f"{found['J/token']} J" + (f", {100 * float(found['J/token, of no target']):.0f} %" if row[1] else "")
