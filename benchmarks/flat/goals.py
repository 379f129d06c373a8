# SPDX-License-Identifier: Apache-2.0
"""Hold a result against goals: figures without neighbours in milliseconds, and their growth beside them in percent.

Run with: PYTHONPATH=src:benchmarks python -m flat.goals RESULTS.json --most tpot_ms.p50=3.6 --growth tpot_ms.p99=3
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flat.report import Figure, Row, rows_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure and its goal."""

    name: str  # metric.percentile
    beside: str  # kind and number of neighbours; empty: none
    value: float  # the median of all runs: milliseconds, or percent more than without neighbours
    goal: float
    runs: int

    @property
    def is_met(self) -> bool:
        """Whether the figure is at most its goal."""
        return self.value <= self.goal

    def show(self) -> str:
        """Return a line of the table."""
        unit, where = ("%", self.beside) if self.beside else ("ms", "no neighbours")
        value = f"{self.value:+.2f}" if self.beside else f"{self.value:.2f}"
        found = "met" if self.is_met else "missed"
        return f"{self.name:14}{where:24}{value:>10} {unit:3}{self.goal:>8g}{self.runs:>6}  {found}"


def judge(result: Mapping[str, Any], most: Mapping[str, float], growth: Mapping[str, float]) -> Iterator[Verdict]:
    """Yield a verdict on each goal; most: milliseconds without neighbours; growth: percent beside each of them.

    Raises:
        ValueError: the result has no such figure.
    """
    rows = [row for row in rows_of(dict(result)) if not row.not_measured]
    for row in rows:
        goals = growth if row.dose else most
        where = f"{row.processes} of {row.kind}" if row.dose else ""
        for name, goal in goals.items():
            figure = _find(row, name)
            yield Verdict(name, where, _grow(figure, name) if row.dose else figure.value, goal, len(figure.values))


def _find(row: Row, name: str) -> Figure:
    if name not in row.figures:
        raise ValueError(f"there is no {name}: the result has {', '.join(row.figures)}")
    return row.figures[name]


def _grow(figure: Figure, name: str) -> float:
    if not figure.base:
        raise ValueError(f"{name} was not measured without neighbours: take dose 0 too")
    return 100 * (figure.value / Figure(figure.base, []).value - 1)


def _goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def main() -> int:
    """Print the table; return 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="results.json of benchmarks/flat/run.py")
    goals = {"--most": "most milliseconds of a figure without neighbours, such as ttft_ms.p50=9"}
    goals["--growth"] = "most percent by which it grows beside neighbours"
    for flag, text in goals.items():
        parser.add_argument(flag, type=_goal, action="append", default=[], metavar="FIGURE=NUMBER", help=text)
    options = parser.parse_args()
    try:
        found = [*judge(json.loads(options.result.read_text()), dict(options.most), dict(options.growth))]
    except ValueError as error:
        parser.error(str(error))
    print(f"{'figure':14}{'beside':24}{'value':>14}{'goal':>8}{'runs':>6}", *(one.show() for one in found), sep="\n")
    return 0 if found and all(one.is_met for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
