# SPDX-License-Identifier: Apache-2.0
"""Draw a part of a trace (two_classes.py --trace) as SVG: whole steps above, segments of best-effort steps below."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

_WIDTH, _LEFT, _RIGHT, _HEIGHT = 860, 130, 10, 150  # pixels
_LANES = (("urgent steps", 40), ("shared steps", 70), ("best-effort steps", 100))
_COLOURS = ("#1f77b4", "#9467bd", "#ff9f40")
_BAR = 20


def read_launches(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a trace, and the end of each launch: when the next pass saw it."""
    columns = {name: np.asarray(values) for name, values in json.loads(path.read_text()).items()}
    launched, retired = (columns[name].astype(np.int64) for name in ("launched_ns", "retired_ns"))
    columns["start"], columns["end"] = launched, np.append(retired[1:], launched[-1])
    return columns


def lane_of(launches: dict[str, np.ndarray], index: int) -> int:
    """Return the row of a launch: of urgent sequences alone, of both classes, or of best-effort ones alone."""
    best_effort, rows = launches["num_best_effort_rows"][index], launches["num_rows"][index]
    return 0 if best_effort == 0 else 2 if best_effort == rows else 1


def draw(launches: dict[str, np.ndarray], first: int, milliseconds: float) -> str:
    """Return an SVG of the time from launch `first` on."""
    begin = int(launches["start"][first])
    scale = (_WIDTH - _LEFT - _RIGHT) / (milliseconds * 1e6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    parts += [f'<text x="8" y="{y + 15}">{name}</text>' for name, y in _LANES]
    for index in range(first, len(launches["start"])):
        left = _LEFT + (int(launches["start"][index]) - begin) * scale
        width = (int(launches["end"][index]) - int(launches["start"][index])) * scale
        if left + width > _WIDTH - _RIGHT:
            break
        lane = lane_of(launches, index)
        parts.append(
            f'<rect x="{left:.1f}" y="{_LANES[lane][1]}" width="{max(width, 1):.1f}" height="{_BAR}" '
            f'fill="{_COLOURS[lane]}" stroke="white"/>'
        )
        if launches["num_segments"][index]:
            parts.append(
                f'<text x="{left + width / 2:.1f}" y="{_LANES[lane][1] + 14}" font-size="9" text-anchor="middle" '
                f'fill="white">{launches["segment"][index] + 1}</text>'
            )
    for tick in range(0, int(milliseconds) + 1, max(1, int(milliseconds / 8))):
        x = _LEFT + tick * 1e6 * scale
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--first", type=int, help="place of the first launch; else where an urgent step passes another")
    parser.add_argument("--milliseconds", type=float, default=100)
    options = parser.parse_args()
    launches = read_launches(options.trace)
    first = options.first
    if first is None:
        passing = (launches["num_segments"][1:-1] == 0) & (launches["segment"][2:] > 1)
        first = max(0, int(np.flatnonzero(passing)[0]) - 3)
    options.svg.write_text(draw(launches, first, options.milliseconds))


if __name__ == "__main__":
    main()
