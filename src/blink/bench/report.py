# SPDX-License-Identifier: Apache-2.0
"""Saves the results: one JSON file with everything, and next to it one page that needs no other file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from blink import __version__
from blink.bench.config import BenchConfig, ResultConfig
from blink.bench.plot import Series, draw_chart
from blink.bench.record import Record
from blink.bench.summary import PLOTTED_PERCENTILES, Summary, percentile_key
from blink.bench.table import make_table
from blink.errors import ConfigError

_COLOURS = {"isolated": "#1f77b4", "interfered": "#d62728"}
_CHARTS = (("ttft", "Time to first token"), ("tpot", "Time per output token"))


def result_path(config: ResultConfig) -> Path | None:
    """Return where to save, or None; the directory exists then.

    Raises:
        ConfigError: the directory cannot be made.
    """
    if not (config.save_result or config.save_detailed or config.result_dir or config.result_filename):
        return None
    name = config.result_filename or f"blink-bench-{datetime.now():%Y%m%d-%H%M%S}.json"
    path = Path(config.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot save in {path.parent}: {error.strerror}") from error
    return path


def build_document(config: BenchConfig, model: str, runs: Sequence[Summary]) -> dict[str, Any]:
    """Return all that is saved, ready for JSON."""
    parameters = asdict(config)
    parameters["server"] |= {"model": model, "api_key": "given" if config.server.api_key else ""}
    return {
        "version": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "parameters": parameters,
        "runs": [_finite(run) for run in runs],
    }


def describe_records(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return what `--save-detailed` adds to a run."""
    return [{**asdict(record), "times": record.times.tolist()} for record in records]


def save(document: dict[str, Any], config: BenchConfig, path: Path) -> list[Path]:
    """Write the JSON file and the page; return their paths.

    Raises:
        ConfigError: a file cannot be written.
    """
    page = path.with_suffix(".html")
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        page.write_text(_render_page(document, config))
    except OSError as error:
        raise ConfigError(f"cannot save {error.filename}: {error.strerror}") from error
    return [path, page]


def _finite(run: Summary) -> Summary:
    """Write an infinite rate as text: JSON has no such number."""
    return {**run, "request_rate": "inf"} if math.isinf(run["request_rate"]) else run


def _render_page(document: dict[str, Any], config: BenchConfig) -> str:
    runs: list[Summary] = [{**run, "request_rate": float(run["request_rate"])} for run in document["runs"]]
    title = f"blink bench: {document['parameters']['server']['model']}"
    header, *rows = make_table(runs, config.result)
    cells = [_row("th", header), *(_row("td", row) for row in rows)]
    notes = [f"<li>{escape(note)}</li>" for run in runs for note in run["warnings"]]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} table {{ border-collapse: collapse }}
th, td {{ padding: 0.2em 0.7em; text-align: right; border-bottom: 1px solid #ddd }}
svg {{ margin: 0.5em }}</style></head>
<body><h1>{escape(title)}</h1>
<p>{document["date"]}, blink {document["version"]}</p>
<div>{"".join(_draw_charts(runs))}</div>
<table>{"".join(cells)}</table>
<ul>{"".join(notes)}</ul>
<details><summary>Parameters</summary><pre>{escape(json.dumps(document["parameters"], indent=1))}</pre></details>
</body></html>
"""


def _draw_charts(runs: Sequence[Summary]) -> list[str]:
    """Draw each latency once, or once for each class of requests."""
    classes = [kind for kind in dict.fromkeys(run.get("class", "") for run in runs) if kind != "both"]
    return [
        _chart(metric, f"{name}, {kind}" if kind else name, [run for run in runs if run.get("class", "") == kind])
        for kind in classes
        for metric, name in _CHARTS
    ]


def _chart(metric: str, name: str, runs: Sequence[Summary]) -> str:
    series: list[Series] = []
    for condition, colour in _COLOURS.items():
        for percentile in PLOTTED_PERCENTILES:
            key = percentile_key(percentile, metric)
            points = [(run["request_rate"], run[key]) for run in runs if run["condition"] == condition and run[key]]
            finite = sorted(point for point in points if math.isfinite(point[0]))
            if finite:
                series.append(Series(f"{condition} p{percentile:g}", colour, percentile > 50, finite))
    return draw_chart(f"{name}, ms", "requests per second", "ms", series)


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
