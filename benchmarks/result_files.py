# SPDX-License-Identifier: Apache-2.0
"""Measurements as they are kept: results/DATE-MACHINE/NAME.json, each with tables of one run on one machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"

Cell = str | int | Decimal | None  # a decimal has the digits that the file has


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; None: not measured."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: str = ""

    def find(self, **wanted: str | float) -> dict[str, Cell]:
        """Return the one row with such cells, by column. Names have underscores for what no name can hold."""
        names = [column.replace(" ", "_").replace("/", "_") for column in self.columns]
        [row] = [row for row in self.rows if wanted.items() <= dict(zip(names, row, strict=True)).items()]
        return dict(zip(self.columns, row, strict=True))


@dataclass(frozen=True, slots=True)
class Result:
    """What one file holds.

    versions: by program. raw_data: where each request's times are, or that they were not kept.
    """

    path: Path
    title: str
    date: str
    machine: str
    versions: dict[str, str]
    settings: list[str]
    commands: list[str]
    runs: str
    raw_data: str
    tables: list[Table]


def read_result(path: Path) -> Result:
    """Read one file. Raises TypeError where a member is missing or unknown."""
    members = json.loads(path.read_text(), parse_float=Decimal)
    tables = [Table(**table) for table in members.pop("tables")]
    return Result(path=path, tables=tables, **members)


def list_results() -> list[Result]:
    """Return all results, the newest first. Files without tables, such as those of `make flat`, are raw data."""
    paths = sorted(RESULTS.glob("*/*.json"))
    paths.sort(key=lambda path: path.parent.name[: len("2026-11-26")], reverse=True)
    return [read_result(path) for path in paths if "tables" in json.loads(path.read_text())]


def fill(page: str, name: str, text: str) -> str:
    """Put a text between the lines `<!-- NAME -->` and `<!-- /NAME -->` of a page."""
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise SystemExit(f"the page lacks the lines {first.strip()} and {last.strip()}")
    return f"{before}{begin}{text}{end}{after}"
