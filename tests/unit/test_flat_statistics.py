# SPDX-License-Identifier: Apache-2.0
"""Statistics, order and tables of the flat protocol (benchmarks/flat) against plain references."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink.region.layout import TRACE_ENTRY
from flat import steps
from flat.cases import CONTROLS, Case, num_neighbours, order_cases
from flat.charts import draw_doses, draw_gaps
from flat.kinds import KINDS
from flat.quantiles import bootstrap, ccdf, describe, histogram, merge
from flat.report import NOT_YET, format_csv, format_table, rows_of
from result_files import fill

_PAGE = Path(__file__).parents[2] / "docs" / "flat.md"


def test_percentiles_are_those_of_the_sorted_values() -> None:
    values = list(range(1001))
    np.random.default_rng(1).shuffle(values)
    assert describe(values) == pytest.approx({"p50": 500, "p90": 900, "p99": 990, "p99.9": 999, "max": 1000})
    assert describe([3.5]) == dict.fromkeys(["p50", "p90", "p99", "p99.9", "max"], 3.5)
    assert describe([]) == {}


def test_ccdf_is_the_share_of_values_that_are_not_below() -> None:
    values = np.random.default_rng(2).lognormal(1, 2, 3000)
    points = ccdf(histogram(values.tolist()))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    for x, share in points:
        assert share == pytest.approx(np.mean(values >= x), abs=1e-12)
    assert points[0][1] == 1.0
    assert values.max() / 10 ** (1 / 40) < points[-1][0] <= values.max()


def test_histograms_add_up_and_gaps_of_one_read_are_counted() -> None:
    first, second = [0.0, 0.0, 5.0, 5.01], [5.02, 700.0]
    total = merge([histogram(first), histogram(second)])
    assert total == histogram(first + second)
    assert sum(total.values()) == 6
    assert ccdf(total)[0] == (pytest.approx(1e-3), 1.0)
    assert ccdf({}) == []


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = ratio_hits = 0
    for trial in range(100):
        values, base = rng.normal(10, 1, 25), rng.normal(5, 0.5, 25)
        low, high = bootstrap(values.tolist(), seed=trial, statistic=np.mean) or (0.0, 0.0)
        hits += low <= 10 <= high
        low, high = bootstrap(values.tolist(), base.tolist(), seed=trial, statistic=np.mean) or (0.0, 0.0)
        ratio_hits += low <= 2 <= high
    assert 85 <= hits <= 100
    assert 85 <= ratio_hits <= 100


def test_too_few_runs_have_no_interval() -> None:
    assert bootstrap([1.0, 2.0]) is None
    assert bootstrap([1.0, 2.0, 3.0], [1.0]) is None
    assert bootstrap([4.0, 4.0, 4.0], [2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_a_dose_is_a_number_of_processes() -> None:
    assert [num_neighbours(dose, 12) for dose in (0, 0.25, 1, 8)] == [0, 3, 12, 96]
    assert num_neighbours(0.25, 2) == 1


def test_every_combination_comes_once_a_run_and_runs_are_in_other_orders() -> None:
    kinds, doses, rates = ["compute", "fork"], [0.0, 1.0, 8.0], [0.5, 8.0, 32.0]
    cases = order_cases(kinds, doses, rates, 5, 0, ["away"])
    assert Counter(cases) == Counter(set(cases))
    assert len(cases) == 5 * (2 * 3 * 3 + 1)
    orders = {tuple((c.kind, c.dose, c.rate) for c in cases if c.run == run) for run in range(5)}
    assert len(orders) == 5
    assert cases[18] == Case("away", 8.0, 8.0, 0)
    assert [c.dose for c in order_cases(kinds, [0.0, 8.0], [8.0], 1, 0, [])] == [0, 8, 0, 8]


def test_gaps_between_steps_skip_idle_times_missed_steps_and_steps_without_tokens() -> None:
    trace = np.zeros(7, TRACE_ENTRY)
    trace["step"] = [1, 2, 3, 5, 6, 7, 8]  # 4 was missed
    trace["ended_ns"] = [1e6, 3e6, 6e6, 20e6, 25e6, 31e6, 0]  # the last one runs
    trace["num_decode_rows"] = [1, 1, 1, 1, 1, 0, 1]
    trace["idle_before"] = [1, 0, 1, 0, 0, 0, 0]
    assert steps.step_gaps(trace).tolist() == [2.0, 5.0]


def test_a_watch_takes_the_steps_after_its_start_and_counts_those_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        """Of an engine whose ring holds five steps."""

        newest = 3

        def __init__(self, region: str) -> None:
            assert region == "r"

        def trace(self) -> np.ndarray:
            ring = np.zeros(min(5, self.newest), TRACE_ENTRY)
            ring["step"] = np.arange(max(0, self.newest - 5), self.newest) + 1
            return ring

        def close(self) -> None:
            self.newest = 0

    monkeypatch.setattr(steps, "RegionReport", Report)
    monkeypatch.setattr(steps, "_LOOK_SECONDS", 600.0)
    watch = steps.StepWatch("r")
    Report.newest = 10
    found, missed = watch.finish()
    assert (found["step"].tolist(), missed) == ([6, 7, 8, 9, 10], 2)
    watch = steps.StepWatch("r")
    found, missed = watch.finish()
    assert (len(found), missed) == (0, 0)


def _case(kind: str, dose: float, run: int, tpot: float, **more: Any) -> dict[str, Any]:
    gaps = [tpot * factor for factor in (0.9, 1.0, 1.1, 4.0)]
    return {
        **{"kind": kind, "dose": dose, "rate": 8.0, "run": run, "processes": int(dose * 12)},
        "requests": {"planned": 10, "ok": 9, "failed": 1, "rejected": 0, "errors": {}, "tokens": 90},
        "ttft_ms": describe([9.0, 10.0]),
        "tpot_ms": describe([tpot]),
        "gap_ms": describe(gaps),
        "gap_histogram": histogram(gaps),
        "client": {"fake_gap_error_ms": describe([0.25]), "fake_gap_histogram": histogram([5.0, 5.1])},
        "neighbours": {"alive": 96, "work": 12345},
        **more,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    cases = [_case(kind, dose, run, 5 + dose + run / 10) for kind in KINDS for dose in (0.0, 8.0) for run in range(3)]
    trace = {"gap_ms": describe([5.0]), "gap_histogram": histogram([5.0])}
    cases[5] |= {"trace": trace}
    cases = [case for case in cases if case["kind"] != "throttle"]
    cases += [{"kind": "throttle", "dose": d, "rate": 8.0, "run": 0, "not_measured": "no cpu.max"} for d in (0.0, 8.0)]
    cases += [_case("stop-engine", 0.0, 0, 5.0, tokens_while_stopped=321)]
    return {
        "cases": cases,
        "date": "2026-11-27T03:00:00+00:00",
        "commit": "0123456789abcdef",
        "machine": {"gpus": ["H100"], "cpu": "a CPU"},
        "server": {"model": "m", "command": "", "version": "1.0"},
        "protocol": {"runs": 3, "duration": 20.0, "client_cpus": [12, 13], "neighbour_cpus": list(range(12))},
    }


def test_rows_join_runs_and_compare_with_no_neighbours(result: dict[str, Any]) -> None:
    rows = {(row.kind, row.dose): row for row in rows_of(result)}
    busy = rows["memory", 8.0].figures["tpot_ms.p50"]
    assert busy.value == pytest.approx(13.1)
    assert busy.interval is not None and 13.0 <= busy.interval[0] <= busy.interval[1] <= 13.2
    assert busy.ratio_interval is not None and 2.4 < busy.ratio_interval[0] <= 13.1 / 5.1 <= busy.ratio_interval[1]
    assert rows["memory", 0.0].figures["tpot_ms.p50"].ratio_interval is None
    assert rows["memory", 8.0].unfinished == pytest.approx(0.1)


def test_the_table_says_what_was_not_measured_once(result: dict[str, Any]) -> None:
    lines = format_table(result).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 7 * 2 + 1 + 1
    assert [line for line in table if "no cpu.max" in line] == [line for line in table if "throttling" in line]
    assert "321 tokens meanwhile" in table[-1]
    assert all(word in lines[0] for word in ("H100", "8 req/s", "3 run(s) of 20 s", "012345678", "2 of its own"))


def test_the_csv_has_a_line_for_each_case(result: dict[str, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(format_csv(result))))
    assert len(lines) == len(result["cases"])
    assert float(lines[4]["tpot_ms.p99"]) == pytest.approx(13.1)
    assert lines[4]["neighbours_work"] == "12345"
    assert [line["not_measured"] for line in lines if line["kind"] == "throttle"] == ["no cpu.max"] * 2


def test_pictures_have_a_line_for_each_kind_that_was_measured(result: dict[str, Any]) -> None:
    doses, gaps = draw_doses(result), draw_gaps(result)
    for picture in (doses, gaps):
        assert ElementTree.fromstring(picture).tag.endswith("svg")
    measured = [kind for name, kind in KINDS.items() if name != "throttle"]
    for kind in measured:
        assert f"{kind.title} p50" in doses and f"{kind.title} p99" in doses and f">{kind.title}<" in gaps
    assert "throttling" not in doses + gaps
    assert doses.count("<polyline") == 2 * len(measured)
    assert gaps.count("<polyline") == 2 + len(measured) + 1  # no neighbours, the client, and the one with a trace
    assert "engine, alone" not in gaps and "engine, busy" in gaps
    assert "nothing to plot" in draw_doses({"cases": [{**result["cases"][-2], "tpot_ms": {}}]})


def test_the_page_takes_a_table_between_its_markers(result: dict[str, Any]) -> None:
    page = _PAGE.read_text()
    filled = fill(page, "flat", format_table(result))
    assert format_table(result) in filled
    assert fill(filled, "flat", NOT_YET) == fill(page, "flat", NOT_YET)
    with pytest.raises(SystemExit, match="lacks the lines"):
        fill("nothing", "flat", "")


def test_the_page_names_every_kind_and_control() -> None:
    page = _PAGE.read_text()
    assert [kind.title for kind in KINDS.values() if f"| {kind.title} |" not in page] == []
    assert [name for name in CONTROLS if name.startswith("stop") and f"`--{name}" not in page] == []
    assert len(page.splitlines()) <= 120
