# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG text. Written by ourselves: two charts are not worth a plotting library of 50 MB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 690  # pixels
_HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 180, 36, 48  # margins; the key is in the right one
_MOST_DIVIDED: Final = 5  # decades up to which y has lines at 2 and 5 as well
_MOST_DOTS: Final = 20  # a line of more points is drawn without


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points in ascending x, y more than 0."""

    name: str
    colour: str
    is_dashed: bool
    points: Sequence[tuple[float, float]]


def draw_chart(
    title: str, x_title: str, y_title: str, series: Sequence[Series], *, is_x_logarithmic: bool = False
) -> str:
    """Return an SVG element: x linear from 0 if not told otherwise, y logarithmic.

    Without any point, return a sentence that says so.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return f"<p>{escape(title)}: nothing to plot.</p>"
    axes = _Axes(points, is_x_logarithmic)
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text((_LEFT + _WIDTH - _RIGHT) / 2, 18, title, "middle", 'font-size="14" font-weight="bold"'),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_title, "middle"),
        _text(14, middle, y_title, "middle", f'transform="rotate(-90 14 {middle})"'),
        *axes.draw(),
    ]
    for index, line in enumerate(series):
        parts += _draw_line(line, axes)
        parts += _draw_key(line, index)
    return "\n".join([*parts, "</svg>"])


class _Axes:
    """Maps values to pixels, and knows the round values in between."""

    def __init__(self, points: Sequence[tuple[float, float]], is_x_logarithmic: bool) -> None:
        self._is_x_logarithmic = is_x_logarithmic
        lowest, highest = min(x for x, _ in points), max(x for x, _ in points)
        if is_x_logarithmic:
            low = math.floor(math.log10(lowest))
            high = max(low + 1, math.ceil(math.log10(highest)))
            self._x_values = [10.0**power for power in range(low, high + 1)]
        else:
            step = _round_step(highest / 6 or 1)
            self._x_values = [number * step for number in range(max(1, math.ceil(highest / step)) + 1)]
        self._y_low = math.floor(math.log10(min(y for _, y in points)))
        self._y_high = max(self._y_low + 1, math.ceil(math.log10(max(y for _, y in points)) + 0.02))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        low, high = self._x_values[0], self._x_values[-1]
        across = math.log(x / low) / math.log(high / low) if self._is_x_logarithmic else x / high
        up = (math.log10(y) - self._y_low) / (self._y_high - self._y_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def draw(self) -> list[str]:
        """Return grid lines and their values."""
        parts: list[str] = []
        for value in self._x_values:
            x, bottom = self.place(value, 10.0**self._y_low)
            parts.append(_line(x, _TOP, x, bottom, "#ddd"))
            parts.append(_text(x, bottom + 16, f"{value:g}", "middle"))
        digits = (1, 2, 5) if self._y_high - self._y_low <= _MOST_DIVIDED else (1,)
        for power in range(self._y_low, self._y_high + 1):
            for digit in digits:
                if power == self._y_high and digit > 1:
                    continue
                x, y = self.place(self._x_values[0], digit * 10.0**power)
                parts.append(_line(x, y, _WIDTH - _RIGHT, y, "#bbb" if digit == 1 else "#eee"))
                parts.append(_text(x - 6, y + 4, f"{digit * 10.0**power:g}", "end"))
        return parts


def _draw_line(line: Series, axes: _Axes) -> list[str]:
    pixels = [axes.place(x, y) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    dotted = pixels if len(pixels) <= _MOST_DOTS else []
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in dotted]
    return [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>', *dots]


def _draw_key(line: Series, index: int) -> list[str]:
    x, y = _WIDTH - _RIGHT + 10, _TOP + 12 + 18 * index
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    stroke = f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{line.colour}" stroke-width="2"{dash}/>'
    return [stroke, _text(x + 32, y + 4, line.name, "start")]


def _round_step(least: float) -> float:
    """Return the next of ..., 1, 2, 5, 10, ... that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * 0.999)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'
