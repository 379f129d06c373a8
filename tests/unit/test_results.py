# SPDX-License-Identifier: Apache-2.0
"""What is made of benchmarks/results is as the scripts write it, and pages name no figure that no result has."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from doc_pages import ROOT, list_pages, name_of, without_code
from make_chart import CHART
from make_results import format_cell, format_table, make_files
from pacing_result import CURVE, PACING, make_pacing, read_runs
from result_files import Table, fill, list_results, read_result

# Not measured: defaults, limits and intervals, as the page writes them.
SETTINGS = {
    "classes.md": ["10 ms", "10 %"],
    "limits.md": ["2 µs"],
    "benchmarking.md": ["10 ms"],
    "energy.md": ["10 ms"],
    "pacing.md": ["15 ms", "40 µs", "0.1 ms"],
    "protocol-rdma.md": ["200 µs"],
    "quantize.md": ["100 times"],
    "scheduling.md": ["10 ms"],
    "security.md": ["100 ms"],
}
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_UNIT = r"(?:ms|µs|us|[TG]B/s|GB per second|tok/s|tokens/s|tokens per second|J/token|J per token|J|W|%|×|times)"
_MEASURED = re.compile(rf"({_NUMBER}(?:\s?(?:/|to|and|or|-|–|\.\.\.)\s?{_NUMBER})*)\s?{_UNIT}(?!\w)")
_COLUMN = re.compile(r"\b(?:ms|µs|us|[TG]B/s|tok/s|tokens/s|J/token|J|W|watts|TTFT|TPOT|ITL)\b|%")
_LOAD = re.compile(r"(?:rows|req/s|wait ms|TPOT target ms|--.*)")  # what was set, not measured
_GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)

_PAGES = [*list_pages(), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
each_page = pytest.mark.parametrize("page", _PAGES, ids=name_of)


def read_numbers(text: str) -> set[str]:
    """Return all numbers of a text, digits as they are, without thousands' commas."""
    return {number.replace(",", "") for number in re.findall(_NUMBER, text)}


@cache
def measured_numbers() -> frozenset[str]:
    """Return every measured number of the results' tables."""
    found: set[str] = set()
    for table in (table for result in list_results() for table in result.tables):
        found |= read_numbers(table.notes)
        for i, title in enumerate(table.columns):
            if _COLUMN.search(f"{title} {table.title}") and not _LOAD.fullmatch(title):
                found |= {number for row in table.rows for number in read_numbers(str(row[i]))}
    return frozenset(found)


def list_measured(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield a page's measured numbers with the words around them: those with a unit, and columns of such numbers."""
    plain = without_code(_GENERATED.sub("", text))
    for match in _MEASURED.finditer(" ".join(plain.split())):
        yield match[0], read_numbers(match[1])
    for block in re.findall(r"(?:^[ ]*\|.*\n)+", plain, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        for i, title in enumerate(head):
            for row in rows if i and _COLUMN.search(" ".join([title, head[0]])) else []:
                yield f"{title}: {row[i]}", read_numbers(row[i])


def find_unknown(text: str, settings: list[str]) -> list[str]:
    """Return a page's figures that no result has, but for settings."""
    return [
        words for words, numbers in list_measured(text) if not numbers <= measured_numbers() and words not in settings
    ]


_MADE = [ROOT / name for name in ("benchmarks/RESULTS.md", "README.md", "docs/pacing.md", "docs/energy.md")]


@pytest.mark.parametrize("path", [*_MADE, CHART, CURVE], ids=name_of)
def test_what_is_made_of_results_is_as_the_scripts_write_it(path: Path) -> None:
    assert path.read_text() == make_files()[path], "run `python benchmarks/make_results.py`"


@each_page
def test_each_measured_number_of_a_page_is_in_a_result(page: Path) -> None:
    assert find_unknown(page.read_text(), SETTINGS.get(name_of(page), [])) == []


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_settings_are_still_on_their_page(name: str) -> None:
    text = next(page for page in _PAGES if name_of(page) == name).read_text()
    assert sorted(set(SETTINGS[name]) - {words for words, _ in list_measured(text)}) == []


def test_the_tables_of_pacing_are_those_of_its_runs() -> None:
    assert PACING.read_text() == make_pacing(), "run `python benchmarks/make_results.py`"
    [table], runs = read_result(PACING).tables, read_runs(PACING.parent)
    assert len(table.rows) == len(runs) > 4
    for (rate, target), found in runs.items():
        row = table.find(req_s=rate, TPOT_target_ms=target)
        energies = sorted(run["joules_per_token"] for run in found)
        assert row["runs"] == len(found) and energies[0] - 1e-4 < float(row["J/token"] or 0) < energies[-1] + 1e-4


def test_runs_of_several_files_are_medians_together(tmp_path: Path) -> None:
    names = ("joules_per_token", "mean_power_w", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")
    for number, scale in enumerate((1.0, 4.0, 2.0)):
        runs = {
            target: [dict.fromkeys((*names, "p99_itl_ms", "held_percent"), scale * factor)]
            for target, factor in ((0.0, 1.0), (10.0, 0.5))
        }
        rows = [{"rate": 0.5, "target_ms": target, "runs": found} for target, found in runs.items()]
        (tmp_path / f"pacing-runs-{number}.json").write_text(json.dumps(rows))
    (tmp_path / "pacing.json").write_text(json.dumps({"title": "t", "tables": []}))
    made = json.loads(make_pacing(tmp_path / "pacing.json"))
    assert made["title"] == "t" and made["tables"][0]["columns"][:4] == ["req/s", "TPOT target ms", "runs", "J/token"]
    assert made["tables"][0]["rows"] == [[0.5, 0, 3, *[2.0] * 8, 1.0], [0.5, 10, 3, *[1.0] * 8, 0.5]]


def test_results_lie_in_a_folder_of_their_date_and_machine() -> None:
    results = list_results()
    assert results
    for result in results:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+", result.path.parent.name)
        assert result.path.parent.name.startswith(result.date)
        assert result.machine and result.runs and result.raw_data and (result.commands or result.settings)
        assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)


def test_the_chart_has_a_bar_of_each_server_alone_and_busy() -> None:
    root = ElementTree.fromstring(CHART.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("height") == "17"]
    assert len(bars) == 16 and {"vLLM", "SGLang", "6.17", "6.52", "63.9", "313"} <= set(texts)
    assert max(float(bar.get("x") or 0) + float(bar.get("width") or 0) for bar in bars) < float(root.get("width") or 0)


def test_unknown_figures_are_found() -> None:
    known = "TPOT is 6.52 ms, then 3,668 / 15,772 ms. It takes 12 s of `9.999 ms`."
    assert find_unknown(known, []) == []
    table = "| a | TPOT |\n|---|---|\n| 7.7777 | 1234.5 |\n"
    text = f"{known}\n\nIt takes 9.999 ms, or 6.52 to 77.123 µs, 8.765× as long.\n\n{table}"
    assert find_unknown(text, []) == ["9.999 ms", "6.52 to 77.123 µs", "8.765×", "TPOT: 1234.5"]
    assert find_unknown(text, ["9.999 ms", "8.765×", "TPOT: 1234.5"]) == ["6.52 to 77.123 µs"]
    assert find_unknown("<!-- flat -->\n9.999 ms\n<!-- /flat -->\n", []) == []


def test_cells_keep_their_digits() -> None:
    assert [format_cell(cell) for cell in (Decimal("5.20"), 15772, None, "a", Decimal("0.0914"))] == [
        "5.20",
        "15,772",
        "",
        "a",
        "0.0914",
    ]
    assert format_table(["a", "b"], [["x", "1"], ["y", ""]])[1] == "| --- | --: |"
    assert format_table(["a"], [["**1**"]])[1] == "| --: |"


def test_a_row_is_found_by_its_cells() -> None:
    table = Table("", ["server", "req/s", "TPOT ms"], [["a", 8, Decimal("5.20")], ["a", Decimal("0.5"), 3]])
    assert table.find(server="a", req_s=0.5)["TPOT ms"] == 3
    with pytest.raises(ValueError, match="unpack"):
        table.find(server="a")


def test_a_block_of_a_page_is_filled() -> None:
    assert fill("a\n<!-- x -->\nold\n<!-- /x -->\nb\n", "x", "new\n") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(SystemExit, match="<!-- x -->"):
        fill("nothing", "x", "")
