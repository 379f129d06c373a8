# SPDX-License-Identifier: Apache-2.0
"""Write what is made of benchmarks/results: RESULTS.md, tables of the README and the docs, charts in docs/images.

The tables of pacing's result are made of its runs first (pacing_result.py).

Run with: python benchmarks/make_results.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from make_chart import CHART, draw_chart
from pacing_result import CURVE, PACING, draw_curve, format_curve, make_pacing
from result_files import RESULTS, ROOT, Cell, Result, Table, fill, list_results, read_result

_SERVERS: Final = ("Blink", "vLLM", "SGLang")
_LOAD: Final = RESULTS / "2026-11-26-h100" / "load.json"
_STEP_ENERGY: Final = RESULTS / "2026-11-27-h100" / "step_energy.json"
# The README's rows: requests per second, busy processes, and the columns that a cell shows.
_SHOWN: Final[list[tuple[float, int, tuple[str, ...]]]] = [
    (8, 0, ("TPOT p50 ms", "TPOT p99 ms")),
    (8, 96, ("TPOT p50 ms", "TPOT p99 ms")),
    (32, 0, ("TPOT p50 ms", "TPOT p99 ms")),
    (32, 96, ("TPOT p50 ms", "TPOT p99 ms")),
    (8, 0, ("TTFT p50 ms", "TTFT p99 ms")),
    (8, 96, ("TTFT p50 ms", "TTFT p99 ms")),
    (32, 0, ("TTFT p50 ms", "TTFT p99 ms")),
    (32, 96, ("TTFT p50 ms", "TTFT p99 ms")),
    (0.5, 0, ("J/token",)),
    (32, 0, ("J/token",)),
]


def format_cell(cell: Cell) -> str:
    """Write a cell: digits as the file has them, thousands with commas."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    return f"{cell:,}"


def format_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned to the right."""
    marks = ["--:" if all(row[i][:1] in "0123456789*" for row in rows) else "---" for i in range(len(columns))]
    return [f"| {' | '.join(row)} |" for row in (columns, marks, *rows)]


def format_result(result: Result) -> Iterator[str]:
    """Yield the lines of one file's section."""
    yield from (f"### {result.title}", "")
    yield f"- Machine: {result.machine}. Date: {result.date}. File: `results/{result.path.relative_to(RESULTS)}`."
    if result.versions:
        yield f"- Versions: {', '.join(f'{name} {version}' for name, version in result.versions.items())}."
    yield f"- Runs: {result.runs}. Raw data: {result.raw_data}."
    yield from (f"- {line[0].upper()}{line[1:]}." for line in result.settings)
    yield from ("", *(["```sh", *result.commands, "```", ""] if result.commands else []))
    for table in result.tables:
        yield from (f"**{table.title}**", "", *format_table(table.columns, _write_rows(table)), "")
        if table.notes:
            yield from (table.notes, "")


def format_page(results: list[Result]) -> str:
    """Return RESULTS.md: a list of contents, and a section for each folder, the newest first."""
    lines = ["# Results", "", "Made by `benchmarks/make_results.py` from `benchmarks/results`. Do not edit.", ""]
    lines += [f"- {result.path.parent.name}: [{result.title}](#{_anchor(result.title)})" for result in results] + [""]
    folder = None
    for result in results:
        if result.path.parent != folder:
            folder = result.path.parent
            lines += [f"## {folder.name}", ""]
        lines += format_result(result)
    raw = sorted(set(RESULTS.glob("*/*")) - {result.path for result in results})
    if raw:
        lines += ["## Raw data", "", *(f"- `results/{path.relative_to(RESULTS)}`" for path in raw), ""]
    return "\n".join(lines)


def format_summary(load: Result) -> str:
    """Return the README's table of a load: one column for each server, the best figures of a row bold."""
    latency, burst = load.tables[:2]
    rows = [_compare(latency, *shown) for shown in _SHOWN]
    rows += [_compare_growth(latency, column) for column in ("TPOT p99 ms", "TTFT p99 ms")]
    rows += [_compare_bursts(burst, column) for column in burst.columns[1:]]
    head = ["", *(f"{server} {load.versions[server]}" for server in _SERVERS)]
    return "\n".join(["", *format_table(head, rows), "", ""])


def _compare(latency: Table, rate: float, busy: int, columns: tuple[str, ...]) -> list[str]:
    found = [latency.find(server=server, req_s=rate, busy_processes=busy) for server in _SERVERS]
    marked = [_mark_best([row[column] for row in found]) for column in columns]
    name = columns[0] if len(columns) == 1 else f"{columns[0].split()[0]} p50 / p99, ms"
    load = f"{rate:g} req/s" + (f", {busy} busy processes" if busy else "")
    return [f"{name}, {load}", *(" / ".join(cells) for cells in zip(*marked, strict=True))]


def _compare_growth(latency: Table, column: str) -> list[str]:
    """Return the row of how many times longer it takes next to busy processes."""
    ratios: list[Cell] = []
    for server in _SERVERS:
        alone, busy = (latency.find(server=server, req_s=8, busy_processes=count)[column] for count in (0, 96))
        ratios.append(f"{float(busy or 0) / float(alone or 1):.3g}")
    name = f"{column.removesuffix(' ms')} busy / alone, 8 req/s"
    return [name, *(f"{cell}×" for cell in _mark_best(ratios))]


def _compare_bursts(burst: Table, column: str) -> list[str]:
    found = [burst.find(server=server)[column] for server in _SERVERS]
    is_rate = column == "tokens/s"
    name = f"{column}, 1,200 requests at once" if is_rate else column
    return [name, *_mark_best(found, max if is_rate else min)]


def _mark_best(cells: list[Cell], best: Callable[[Iterable[float]], float] = min) -> list[str]:
    """Write the cells, the best in bold."""
    values = [float(cell or 0) for cell in cells]
    written = [format_cell(cell) for cell in cells]
    return [f"**{text}**" if value == best(values) else text for text, value in zip(written, values, strict=True)]


def make_files() -> dict[Path, str]:
    """Return what is made of the results, by its file."""
    readme, pacing_page, energy_page = ROOT / "README.md", ROOT / "docs" / "pacing.md", ROOT / "docs" / "energy.md"
    pacing = read_result(PACING)
    energy = fill(energy_page.read_text(), "curve", _write_block(*format_curve(pacing)))
    return {
        ROOT / "benchmarks" / "RESULTS.md": format_page(list_results()),
        readme: fill(readme.read_text(), "results", format_summary(read_result(_LOAD))),
        pacing_page: fill(pacing_page.read_text(), "pacing", _write_tables(pacing)),
        energy_page: fill(energy, "steps", _write_tables(read_result(_STEP_ENERGY)) if _STEP_ENERGY.exists() else ""),
        CHART: draw_chart(),
        CURVE: draw_curve(pacing),
    }


def _write_tables(result: Result) -> str:
    return "".join(f"\n**{table.title}**\n{_write_block(table.columns, _write_rows(table))}" for table in result.tables)


def _write_block(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["", *format_table(columns, rows), "", ""])


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _write_rows(table: Table) -> list[list[str]]:
    return [[format_cell(cell) for cell in row] for row in table.rows]


def main() -> None:
    """Write all files."""
    PACING.write_text(make_pacing())
    for path, text in make_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
