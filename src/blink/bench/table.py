# SPDX-License-Identifier: Apache-2.0
"""The results as a table, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blink.bench.config import ResultConfig
from blink.bench.summary import Summary, percentile_key


def make_table(runs: Sequence[Summary], config: ResultConfig) -> list[list[str]]:
    """Return the header and one row per run; columns that no run has are left out."""
    return [list(column) for column in zip(*_columns(runs, config), strict=True)]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of a table: the first to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def show(value: float | None) -> str:
    """Write a figure with three digits, or more where they stand before the point."""
    if value is None:
        return "-"
    magnitude = abs(value)
    decimals = next((number for limit, number in ((100, 0), (10, 1), (0.995, 2)) if magnitude >= limit), 3)
    return f"{value:.{decimals}f}"


def _columns(runs: Sequence[Summary], config: ResultConfig) -> list[list[str]]:
    columns = [
        ["condition", *(str(run["condition"]) for run in runs)],
        *([["class", *(str(run.get("class", "")) for run in runs)]] if any("class" in run for run in runs) else []),
        ["rate", *(f"{run['request_rate']:g}" for run in runs)],
        ["ok", *(str(run["completed"]) for run in runs)],
        ["bad", *(str(run["failed"] + run["rejected"]) for run in runs)],
        _figures("req/s", runs, ["request_throughput"]),
        _figures("tok/s", runs, ["output_throughput"]),
    ]
    levels = config.percentiles
    shown = "/".join(f"p{level:g}" for level in levels)
    for metric in config.metrics:
        keys = [percentile_key(level, metric) for level in levels]
        columns.append(_figures(f"{metric.upper()} ms {shown}", runs, keys))
    if any("mean_power_w" in run for run in runs):
        columns += [_figures("W", runs, ["mean_power_w"]), _figures("J/token", runs, ["joules_per_token"])]
    if any("server_cpu_s" in run for run in runs):
        columns.append(_figures("CPU s/1000 tok", runs, ["cpu_s_per_1000_tokens"]))
    columns.append(_figures("lag ms", runs, ["p99_send_lag_ms", "p99_loop_lag_ms"]))
    return columns


def _figures(title: str, runs: Sequence[Summary], keys: Sequence[str]) -> list[str]:
    values: list[list[Any]] = [[run.get(key) for key in keys] for run in runs]
    return [title, *("/".join(show(value) for value in row) for row in values)]
