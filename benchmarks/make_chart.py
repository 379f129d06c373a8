# SPDX-License-Identifier: Apache-2.0
"""Draw the README's chart: p99 of TPOT and TTFT of each server, alone and next to 96 busy processes, as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from typing import Final

from result_files import RESULTS, ROOT, Table, read_result

CHART: Final = ROOT / "docs" / "images" / "flat-chart.svg"
_FOLDER: Final = RESULTS / "2026-11-26-h100"
_RATE: Final = 8  # requests per second
_BUSY: Final = 96  # processes
_ALONE_COLOUR, _BUSY_COLOUR = "#9bb7d4", "#d62728"

_WIDTH, _PANEL, _TOP, _BAR, _GROUP = 860, 430, 78, 17, 52  # pixels
_LEFT, _RIGHT = 128, 52  # margins of a panel: names, and values after the longest bar
_SERVERS: Final = ("Blink", "vLLM", "SGLang")
_KEPT: Final = "Blink, kept cores"
_TITLE: Final = f"Latency at {_RATE} requests per second, 99th percentile"
_CORES: Final = "Busy processes run on all of the server's cores; with kept cores, on the others."
_SMALL: Final = 'font-size="11" fill="#555"'


@dataclass(frozen=True, slots=True)
class Group:
    """A server's two bars, in milliseconds."""

    name: str
    note: str  # below the name
    alone: Decimal
    busy: Decimal


def read_groups(column: str) -> list[Group]:
    """Return the servers that share their cores, then Blink with kept cores."""
    load, kept = (read_result(_FOLDER / f"{name}.json").tables[0] for name in ("load", "kept_cores"))
    groups = [Group(name, "", *_read_pair(load, name, column)) for name in _SERVERS]
    return [*groups, Group("Blink", "2 cores kept", *_read_pair(kept, _KEPT, column))]


def draw_chart() -> str:
    """Return the chart as an SVG document."""
    height = _TOP + 4 * _GROUP + 44
    result = read_result(_FOLDER / "load.json")
    versions = ", ".join(f"{name} {result.versions[name]}" for name in _SERVERS)
    machine, runs = result.machine.split(",")[0], result.runs.split(" for")[0]
    source = f"Measured on {machine}, Llama-3.1-8B in bf16: {versions}; {runs}, {result.date}."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{_TITLE}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(16, 22, _TITLE, 'font-size="15" font-weight="bold"'),
        *_draw_key(),
        *_draw_panel(0, "Time per output token (TPOT), ms", read_groups("TPOT p99 ms")),
        *_draw_panel(_PANEL, "Time to first token (TTFT), ms", read_groups("TTFT p99 ms")),
        _text(16, height - 26, f"{_CORES} Kept cores: another machine of this kind.", _SMALL),
        _text(16, height - 10, source, _SMALL),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _read_pair(table: Table, server: str, column: str) -> tuple[Decimal, Decimal]:
    alone, busy = (table.find(server=server, req_s=_RATE, busy_processes=count)[column] for count in (0, _BUSY))
    return Decimal(alone or 0), Decimal(busy or 0)


def _draw_key() -> Iterator[str]:
    x = 16
    for colour, text in ((_ALONE_COLOUR, "alone"), (_BUSY_COLOUR, f"next to {_BUSY} busy processes")):
        yield f'<rect x="{x}" y="33" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 18, 43, text)
        x += 74


def _draw_panel(left: int, title: str, groups: Sequence[Group]) -> Iterator[str]:
    """Yield a panel: a pair of bars for each group, lengths from 0, and a line between shared and kept cores."""
    scale = (_PANEL - _LEFT - _RIGHT) / float(max(max(group.alone, group.busy) for group in groups))
    yield _text(left + 16, _TOP - 10, title, 'font-weight="bold"')
    for index, group in enumerate(groups):
        y = _TOP + index * _GROUP + (10 if group.note else 0)
        if group.note:
            yield f'<line x1="{left + 16}" y1="{y - 4}" x2="{left + _PANEL - 16}" y2="{y - 4}" stroke="#bbb"/>'
        yield _text(left + _LEFT - 8, y + _BAR + (1 if group.note else 7), group.name, 'text-anchor="end"')
        if group.note:
            yield _text(left + _LEFT - 8, y + _BAR + 15, group.note, f'text-anchor="end" {_SMALL}')
        for row, (value, colour) in enumerate(((group.alone, _ALONE_COLOUR), (group.busy, _BUSY_COLOUR))):
            top, width = y + 3 + row * (_BAR + 2), round(float(value) * scale, 1)
            yield f'<rect x="{left + _LEFT}" y="{top}" width="{width}" height="{_BAR}" fill="{colour}"/>'
            yield _text(left + _LEFT + width + 5, top + 13, str(value))


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{" " if more else ""}{more}>{escape(text, quote=False)}</text>'
