# SPDX-License-Identifier: Apache-2.0
"""From a result's cases to rows with intervals, a CSV file, and the table of docs/flat.md.

Run with: PYTHONPATH=benchmarks python -m flat.report RESULTS.json [--into docs/flat.md]
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flat.cases import CONTROLS, title_of
from flat.kinds import KINDS
from flat.quantiles import bootstrap
from result_files import fill

_METRICS: Final = ("ttft_ms", "tpot_ms", "gap_ms")
_PERCENTILES: Final = ("p50", "p90", "p99", "p99.9", "max")
_SHOWN: Final = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
NOT_YET: Final = "Not measured yet.\n"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of several runs, and the same without neighbours."""

    values: list[float]
    base: list[float]  # empty: these are those

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The median's 95 % interval; None of too few runs."""
        return bootstrap(self.values)

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio to no neighbours; None of too few runs."""
        return bootstrap(self.values, self.base) if self.base else None


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of a kind, dose and rate."""

    kind: str
    dose: float
    rate: float
    processes: int
    figures: dict[str, Figure]  # by metric.percentile; empty: not measured
    unfinished: float  # share of requests
    tokens_while_stopped: list[int]  # of each run
    not_measured: str


def flatten(case: dict[str, Any]) -> dict[str, float]:
    """Return a case's figures by names such as tpot_ms.p99."""
    parts = {name: case.get(name) or {} for name in _METRICS}
    parts["client_gap_error_ms"] = case.get("client", {}).get("fake_gap_error_ms", {})
    parts["step_gap_ms"] = (case.get("trace") or {}).get("gap_ms", {})
    return {
        f"{name}.{key}": part[key] for name, part in parts.items() for key in _PERCENTILES if part.get(key) is not None
    }


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Return one row for each kind, dose and rate, in the order of the tables."""
    groups: dict[tuple[str, float, float], list[dict[str, Any]]] = {}
    for case in result["cases"]:
        groups.setdefault((case["kind"], case["dose"], case["rate"]), []).append(case)
    order = [*KINDS, *CONTROLS]
    rows: list[Row] = []
    for (kind, dose, rate), cases in sorted(groups.items(), key=lambda g: (g[0][2], order.index(g[0][0]), g[0][1])):
        base = [flatten(case) for case in groups.get((kind, 0.0, rate), [])] if dose else []
        found = [flatten(case) for case in cases]
        names = dict.fromkeys(name for one in found for name in one)
        figures = {name: Figure(_values(found, name), _values(base, name)) for name in names}
        planned = sum(case["requests"]["planned"] for case in cases if "requests" in case)
        ok = sum(case["requests"]["ok"] for case in cases if "requests" in case)
        reasons = {case["not_measured"] for case in cases if "not_measured" in case}
        rows.append(
            Row(
                kind,
                dose,
                rate,
                max(case.get("processes", 0) for case in cases),
                figures,
                1 - ok / planned if planned else 0.0,
                [case["tokens_while_stopped"] for case in cases if "tokens_while_stopped" in case],
                "; ".join(sorted(reasons)),
            )
        )
    return rows


def main_rate(result: dict[str, Any]) -> float:
    """Return the rate that tables and pictures show: the middle one."""
    rates = sorted({case["rate"] for case in result["cases"]})
    return rates[len(rates) // 2]


def format_csv(result: dict[str, Any]) -> str:
    """Write one line for each case."""
    first = ["kind", "dose", "rate", "run", "processes", "planned", "ok", "failed", "rejected", "tokens"]
    first += ["tokens_while_stopped", "psi_share", "neighbours_alive", "neighbours_work", "not_measured"]
    names = list(dict.fromkeys(name for case in result["cases"] for name in flatten(case)))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*first, *names], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for case in result["cases"]:
        done = {f"neighbours_{name}": value for name, value in case.get("neighbours", {}).items()}
        writer.writerow({**case, **case.get("requests", {}), **done, **flatten(case)})
    return text.getvalue()


def format_table(result: dict[str, Any]) -> str:
    """Write what was measured, where, and a table for Markdown with all figures in milliseconds."""
    rate = main_rate(result)
    rows = [row for row in rows_of(result) if row.rate == rate]
    head = ["neighbours", "per core", *(f"{name} p50 / p99" for name, _ in _SHOWN)]
    head += ["token gap p99 / p99.9 / max", "unfinished", "client's own error p99"]
    lines = [_describe(result, rate), "", _line(head), _line(["---", *["--:"] * (len(head) - 1)])]
    refused: set[str] = set()
    for row in rows:
        counts = f" ({', '.join(map(str, row.tokens_while_stopped))} tokens meanwhile)"
        start = [title_of(row.kind) + (counts if row.tokens_while_stopped else ""), f"{row.dose:g}"]
        if row.not_measured:
            if row.kind not in refused:
                lines.append(_line([start[0], "all", f"not measured: {row.not_measured}", *[""] * (len(head) - 3)]))
            refused.add(row.kind)
            continue
        cells = [_cell(row, metric, ("p50", "p99")) for _, metric in _SHOWN]
        cells += [_cell(row, "gap_ms", ("p99", "p99.9", "max")), f"{row.unfinished:.1%}"]
        lines.append(_line([*start, *cells, _cell(row, "client_gap_error_ms", ("p99",))]))
    return "\n".join(lines) + "\n"


def _describe(result: dict[str, Any], rate: float) -> str:
    machine, protocol, server = result["machine"], result["protocol"], result["server"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    cpus = len(protocol["neighbour_cpus"])
    client = protocol["client_cpus"]
    commit = (result["commit"] or "unknown commit")[:9]
    return (
        f"{server['model']} on {gpus}, {machine['cpu']}. Server: {server['command'] or 'not ours'}, "
        f"version {server['version'] or 'unknown'}. {rate:g} req/s, {protocol['runs']} run(s) of "
        f"{protocol['duration']:g} s for each line, {result['date'][:10]}, commit {commit}. "
        f"Neighbours had {cpus} cores; the client had {f'{len(client)} of its own' if client else 'none of its own'}. "
        "All times are milliseconds."
    )


def _values(found: Sequence[dict[str, float]], name: str) -> list[float]:
    return [one[name] for one in found if name in one]


def _cell(row: Row, metric: str, percentiles: Sequence[str]) -> str:
    found = [row.figures.get(f"{metric}.{percentile}") for percentile in percentiles]
    return " / ".join("-" if figure is None else _number(figure) for figure in found)


def _number(figure: Figure) -> str:
    text = f"{figure.value:.3g}" if figure.value < 1000 else f"{figure.value:.0f}"
    interval = figure.interval
    return f"{text} ({interval[0]:.3g} to {interval[1]:.3g})" if interval else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table of a result, or put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="results.json of a run")
    parser.add_argument("--into", type=Path, help="page with the markers")
    options = parser.parse_args()
    table = format_table(json.loads(options.result.read_text()))
    if options.into:
        options.into.write_text(fill(options.into.read_text(), "flat", table))
    else:
        print(table)


if __name__ == "__main__":
    main()
