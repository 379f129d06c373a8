# SPDX-License-Identifier: Apache-2.0
"""The two pictures of a result: TPOT by neighbours per core, and how often a token comes late."""

from __future__ import annotations

from typing import Any, Final

from blink.bench.plot import Series, draw_chart
from flat.cases import title_of
from flat.kinds import KINDS
from flat.quantiles import ccdf, merge
from flat.report import Row, main_rate, rows_of

_COLOURS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_LEAST_SHOWN_MS: Final = 0.1  # events that came in one read are further left
_GREY: Final = "#7f7f7f"


def draw_doses(result: dict[str, Any]) -> str:
    """Return an SVG: p50 (whole lines) and p99 (dashed) of TPOT by neighbours per core, one colour a kind."""
    rate = main_rate(result)
    rows = [row for row in rows_of(result) if row.rate == rate and row.kind in KINDS]
    series: list[Series] = []
    for name, is_dashed in (("p50", False), ("p99", True)):
        for kind, colour in zip(KINDS, _COLOURS, strict=True):
            points = sorted((row.dose, _value(row, name)) for row in rows if row.kind == kind)
            if points := [(dose, value) for dose, value in points if value > 0]:
                series.append(Series(f"{title_of(kind)} {name}", colour, is_dashed, points))
    return draw_chart(f"TPOT at {rate:g} req/s", "busy processes per core", "TPOT, ms", series)


def draw_gaps(result: dict[str, Any]) -> str:
    """Return an SVG, both axes logarithmic: the share of token gaps that are longer, without neighbours and with most.

    Dashed are the gaps between the engine's steps by its own clock, where they were read; black those of the client
    alone, from a server whose gaps are fixed.
    """
    rate = main_rate(result)
    cases = [case for case in result["cases"] if case["rate"] == rate and case["kind"] in KINDS and "ttft_ms" in case]
    most = max((case["dose"] for case in cases), default=0.0)
    alone = [case for case in cases if case["dose"] == 0]
    busy = [case for case in cases if case["dose"] == most > 0]
    lines = [("no neighbours", _GREY, False, [case["gap_histogram"] for case in alone])]
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        lines.append((title_of(kind), colour, False, [case["gap_histogram"] for case in busy if case["kind"] == kind]))
    for name, colour, chosen in (("engine, alone", _GREY, alone), ("engine, busy", "black", busy)):
        lines.append((name, colour, True, [case["trace"]["gap_histogram"] for case in chosen if "trace" in case]))
    lines.append(("client alone", "black", False, [case["client"]["fake_gap_histogram"] for case in busy]))
    series = [
        Series(name, colour, is_dashed, [point for point in ccdf(merge(histograms)) if point[0] > _LEAST_SHOWN_MS])
        for name, colour, is_dashed, histograms in lines
        if histograms
    ]
    title = f"Token gaps at {rate:g} req/s and {most:g} busy processes per core"
    return draw_chart(title, "gap, ms", "share of gaps that are not shorter", series, is_x_logarithmic=True)


def _value(row: Row, percentile: str) -> float:
    found = row.figures.get(f"tpot_ms.{percentile}")
    return found.value if found else 0.0
