# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `blink bench` on records made by hand, and what it writes."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from blink.bench.config import BenchConfig, ResultConfig, ServerConfig
from blink.bench.measurement import Measurement
from blink.bench.plot import Series, draw_chart
from blink.bench.record import Record
from blink.bench.report import build_document, describe_records, result_path, save
from blink.bench.summary import summarise
from blink.bench.table import format_table, make_table, show
from blink.bench.usage import Usage
from blink.errors import ConfigError


def _record(index: int, sent: float, times: list[float], tokens: int | None = None, **other: Any) -> Record:
    values: dict[str, Any] = {"input_len": 10, "output_len": tokens or len(times), "ended": times[-1]}
    values |= {"outcome": "ok", "error": "", "input_tokens": 11, "output_tokens": tokens, "at": sent}
    return Record(index=index, sent=sent, times=array("d", times), **(values | other))


def _refused(index: int, outcome: Any, error: str) -> Record:
    return Record(index, 0.0, 10, 5, sent=0.0, ended=0.1, outcome=outcome, error=error)


def _measure(
    *records: Record,
    joules: float | None = None,
    cpu_seconds: float | None = None,
    lags: list[float] | None = None,
) -> Measurement:
    return Measurement(list(records), array("d", lags or [0.0]), Usage(joules, cpu_seconds), 2.0)


def test_figures_of_two_requests_are_those_computed_by_hand() -> None:
    first = _record(0, 1.0, [1.1, 1.2, 1.4], tokens=5)  # the last event brought three tokens
    second = _record(1, 2.0, [2.3, 2.4, 2.5], tokens=3)
    run = summarise(_measure(first, second, joules=40.0, cpu_seconds=0.4), [50, 90])
    assert (run["completed"], run["failed"], run["rejected"]) == (2, 0, 0)
    assert (run["total_input_tokens"], run["total_output_tokens"]) == (22, 8)
    assert run["duration"] == pytest.approx(2.5)
    assert run["request_throughput"] == pytest.approx(2 / 2.5)
    assert run["output_throughput"] == pytest.approx(8 / 2.5)
    assert run["total_token_throughput"] == pytest.approx(30 / 2.5)
    assert run["tokens_per_event"] == pytest.approx(8 / 6)
    assert run["mean_ttft_ms"] == pytest.approx(200)
    assert run["p50_ttft_ms"] == pytest.approx(200)
    assert run["p90_ttft_ms"] == pytest.approx(280)
    assert run["mean_tpot_ms"] == pytest.approx((300 / 4 + 200 / 2) / 2)
    assert run["mean_itl_ms"] == pytest.approx((100 + 200 + 100 + 100) / 4)
    assert run["mean_e2el_ms"] == pytest.approx(450)
    assert run["p99_ttft_ms"] == pytest.approx(float(np.percentile([100, 300], 99)))
    assert run["mean_power_w"] == pytest.approx(20)
    assert run["joules_per_token"] == pytest.approx(5)
    assert (run["server_cpu_s"], run["cpu_s_per_1000_tokens"]) == (0.4, pytest.approx(50))
    assert run["warnings"] == []


def test_two_classes_are_reported_apart_and_together(tmp_path: Path) -> None:
    urgent, flex = _record(0, 1.0, [1.1, 1.2]), _record(1, 1.0, [1.6, 1.8, 2.0], request_class="flex")
    parts = _measure(urgent, flex, joules=10.0).split()
    runs = [
        {"condition": "isolated", "request_rate": 2.0, "class": name} | summarise(part, [50])
        for name, part in parts.items()
    ]
    found = [(run["class"], run["completed"], run["p50_ttft_ms"], "joules_per_token" in run) for run in runs]
    assert [(name, count, pytest.approx(ttft), power) for name, count, ttft, power in found] == [
        ("default", 1, 100, False),
        ("flex", 1, 600, False),
        ("both", 2, 350, True),
    ]
    assert [row[1] for row in make_table(runs, ResultConfig(metric_percentiles="50"))] == ["class", *parts]
    path = tmp_path / "two.json"
    save(build_document(BenchConfig(), "m", runs), BenchConfig(), path)
    page = path.with_suffix(".html").read_text()
    assert page.count("<svg") == 4 and "Time to first token, flex" in page and ", both" not in page


def test_only_answers_count_and_reasons_are_kept() -> None:
    good = _record(0, 0.0, [0.5], tokens=1)
    bad = [_refused(1, "rejected", "HTTP 503: full"), _refused(2, "rejected", "HTTP 503: full")]
    run = summarise(_measure(good, *bad, _refused(3, "failed", "cannot connect")), [99])
    assert (run["completed"], run["rejected"], run["failed"]) == (1, 2, 1)
    assert run["errors"] == {"HTTP 503: full": 2, "cannot connect": 1}
    assert run["mean_ttft_ms"] == pytest.approx(500)
    assert run["mean_tpot_ms"] is None  # one token has no time between tokens
    assert "mean_power_w" not in run and "server_cpu_s" not in run


def test_nothing_answered_gives_no_figures_and_no_crash() -> None:
    run = summarise(_measure(_refused(0, "failed", "gone"), joules=1.0, cpu_seconds=1.0), [50])
    assert run["p50_ttft_ms"] is None
    assert run["joules_per_token"] is None and run["cpu_s_per_1000_tokens"] is None
    assert run["output_throughput"] == 0


def test_answers_without_usage_count_events_and_say_so() -> None:
    run = summarise(_measure(_record(0, 0.0, [0.1, 0.2])), [50])
    assert run["total_output_tokens"] == 2
    assert any("without usage" in warning for warning in run["warnings"])


def test_short_answers_are_told() -> None:
    run = summarise(_measure(_record(0, 0.0, [0.1], tokens=1, output_len=9)), [50])
    assert any("shorter than asked for" in warning for warning in run["warnings"])


@pytest.mark.parametrize(
    ("late", "lag", "doubts"), [(0.002, 0.002, 0), (0.02, 0.0, 1), (0.0, 0.02, 1), (0.02, 0.02, 2)]
)
def test_lateness_of_the_client_makes_the_figures_doubtful(late: float, lag: float, doubts: int) -> None:
    run = summarise(_measure(_record(0, 1.0 + late, [1.1], tokens=1, at=1.0), lags=[lag]), [50])
    assert run["p99_send_lag_ms"] == pytest.approx(late * 1e3)
    assert run["p99_loop_lag_ms"] == pytest.approx(lag * 1e3)
    assert sum(warning.startswith("DOUBTFUL") for warning in run["warnings"]) == doubts


def test_lateness_is_allowed_in_proportion_to_slow_answers() -> None:
    run = summarise(_measure(_record(0, 0.0, [1.0], tokens=1), lags=[0.09]), [50])
    assert run["warnings"] == []


def _runs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rate in (0.5, 8.0, math.inf):
        for condition, factor in (("isolated", 1), ("interfered", 5)):
            measurement = _measure(
                _record(0, 0.0, [0.1 * factor, 0.2 * factor], tokens=2), joules=3.0, cpu_seconds=0.25
            )
            found.append({"condition": condition, "request_rate": rate, **summarise(measurement, [50, 99])})
    return found


def test_saved_files_hold_everything_but_the_key(tmp_path: Path) -> None:
    config = BenchConfig(server=ServerConfig(api_key="secret-key"), result=ResultConfig(result_dir=str(tmp_path / "a")))
    path = result_path(config.result)
    assert path is not None
    runs = _runs()
    runs[0]["requests"] = describe_records([_record(0, 0.0, [0.1])])
    written = save(build_document(config, "some-model", runs), config, path)
    assert [one.suffix for one in written] == [".json", ".html"]
    document = json.loads(path.read_text())
    assert document["parameters"]["load"]["seed"] == 0
    assert document["parameters"]["server"]["model"] == "some-model"
    assert [run["request_rate"] for run in document["runs"]] == [0.5, 0.5, 8.0, 8.0, "inf", "inf"]
    assert document["runs"][0]["requests"][0]["times"] == [0.1]
    page = written[1].read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http with", "")
    assert not any("secret-key" in one.read_text() for one in written)


def test_nothing_is_saved_unless_asked_for() -> None:
    assert result_path(ResultConfig()) is None


def test_table_shows_the_percentiles_chosen_and_power_only_when_read() -> None:
    runs = _runs()
    config = ResultConfig(percentile_metrics="tpot", metric_percentiles="99,50")
    header, first, *rest = make_table(runs, config)
    assert header[6:] == ["TPOT ms p99/p50", "W", "J/token", "CPU s/1000 tok", "lag ms"]
    assert first[:7] == ["isolated", "0.5", "1", "0", "5.00", "10.0", "100/100"]
    assert len(rest) == 5
    lines = format_table([header, first, *rest]).splitlines()
    assert len({line.index("/") for line in lines[1:]}) == 1
    for run in runs:
        del run["mean_power_w"], run["joules_per_token"], run["server_cpu_s"]
    assert make_table(runs, config)[0][6:] == ["TPOT ms p99/p50", "lag ms"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.1234, "0.123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234"), (0, "0.000")],
)
def test_figures_are_written_with_three_digits(value: float | None, text: str) -> None:
    assert show(value) == text


def test_chart_is_well_formed_and_higher_values_are_higher() -> None:
    line = Series("a <&> b", "#123456", True, [(0.5, 3.0), (8, 30.0), (32, 4000.0)])
    chart = ElementTree.fromstring(draw_chart("T & t", "x", "y", [line]))
    dots = [element for element in chart.iter() if element.tag.endswith("circle")]
    across, down = [float(dot.attrib["cx"]) for dot in dots], [float(dot.attrib["cy"]) for dot in dots]
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    assert all(0 <= x <= 510 for x in across)
    assert all(0 <= y <= 340 for y in down)


def test_decades_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    line = Series("a", "red", False, [(0.02, 1.0), (0.2, 1.0), (2, 1.0), (200, 1.0)])
    chart = ElementTree.fromstring(draw_chart("t", "x", "y", [line], is_x_logarithmic=True))
    across = [float(dot.attrib["cx"]) for dot in chart.iter() if dot.tag.endswith("circle")]
    decade = across[1] - across[0]
    assert [across[2] - across[1], across[3] - across[2]] == pytest.approx([decade, 2 * decade], abs=0.2)
    assert 64 <= across[0] < across[-1] <= 510.1


@pytest.mark.parametrize("is_x_logarithmic", [False, True])
def test_chart_of_equal_points_is_no_crash(is_x_logarithmic: bool) -> None:
    lines = [Series("a", "red", False, [(1.0, 1.0), (1.0, 1.0)])]
    assert "circle" in draw_chart("t", "x", "y", lines, is_x_logarithmic=is_x_logarithmic)
    assert "circle" in draw_chart("t", "x", "y", [Series("a", "red", False, [(0.0, 1.0)])])


def test_chart_of_one_point_or_none_is_no_crash() -> None:
    assert "circle" in draw_chart("t", "x", "y", [Series("a", "red", False, [(1.0, 1.0)])])
    assert "nothing" in draw_chart("t", "x", "y", [])


@pytest.mark.parametrize(
    "config", [ResultConfig(percentile_metrics="ttft,xyz"), ResultConfig(metric_percentiles="101")]
)
def test_unknown_metrics_and_percentiles_are_refused(config: ResultConfig) -> None:
    with pytest.raises(ConfigError, match="metric"):
        _ = config.metrics, config.percentiles
