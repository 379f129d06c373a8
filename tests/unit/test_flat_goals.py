# SPDX-License-Identifier: Apache-2.0
"""Goals of latency (benchmarks/flat/goals.py): medians of runs, and growth against runs without neighbours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flat.goals import judge, main

ALONE, BESIDE = [(8.0, 3.5), (9.5, 3.55), (8.8, 3.7)], [(9.9, 3.5), (8.9, 3.6), (8.6, 3.58)]


def make_result(alone: list[tuple[float, float]] = ALONE) -> dict[str, Any]:
    """Return a result of runs of TTFT and TPOT p50, alone and beside 96 processes; p99 is ten times as long."""
    cases = [
        {
            "kind": "compute",
            "dose": dose,
            "rate": 8.0,
            "run": run,
            "processes": int(12 * dose),
            "requests": {"planned": 10, "ok": 10},
            "ttft_ms": {"p50": ttft, "p99": 10 * ttft},
            "tpot_ms": {"p50": tpot, "p99": 10 * tpot},
        }
        for dose, runs in ((0.0, alone), (8.0, BESIDE))
        for run, (ttft, tpot) in enumerate(runs)
    ]
    return {"cases": cases}


def test_medians_are_held_against_goals() -> None:
    growth = {"ttft_ms.p50": 1.0, "tpot_ms.p99": 0.5}
    first, second, third, last = judge(make_result(), {"ttft_ms.p50": 8.8, "tpot_ms.p50": 3.5}, growth)
    assert (first.value, first.is_met, first.beside, first.runs) == (8.8, True, "", 3)
    assert (second.value, second.is_met) == (3.55, False)
    assert third.value == pytest.approx(100 * (8.9 / 8.8 - 1)) and not third.is_met
    assert third.beside == "96 of compute"
    assert last.value == pytest.approx(100 * (3.58 / 3.55 - 1)) and not last.is_met


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], *goals: str) -> int:
    (folder / "results.json").write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["goals", str(folder / "results.json"), *goals])
    return main()


def test_the_status_says_whether_all_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, monkeypatch, make_result(), "--most=ttft_ms.p50=9", "--growth=ttft_ms.p50=1.2") == 0
    assert "ttft_ms.p50   96 of compute                +1.14 %       1.2     3  met" in capsys.readouterr().out
    assert run(tmp_path, monkeypatch, make_result(), "--most=ttft_ms.p50=9", "--growth=tpot_ms.p50=0.5") == 1
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("goal", "alone", "reason"),
    [
        ("--most=itl_ms.p50=9", ALONE, "there is no itl_ms.p50: the result has ttft_ms.p50"),
        ("--growth=tpot_ms.p50=1", [], "not measured without neighbours: take dose 0 too"),
    ],
)
def test_what_was_not_measured_is_no_goal_met(
    goal: str,
    alone: list[tuple[float, float]],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, make_result(alone), goal)
    assert reason in capsys.readouterr().err
