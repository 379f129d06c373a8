# SPDX-License-Identifier: Apache-2.0
"""Figures drawn for a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blink.api.observe.engine_metrics import CLASSES
from blink.view.figures import Figures

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 60
_NOTHING = "-"


class Screen:
    """The live view; remembers enough of the past for its small charts."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._past: dict[str, deque[float]] = {}

    def draw(self, figures: Figures) -> RenderableType:
        """Return the view of the newest figures."""
        self._remember(figures)
        return Group(self._head(figures), self._load(figures), self._steps(figures), _frontends(figures))

    def draw_lack(self, reason: str) -> RenderableType:
        """Return the view of a server that does not answer."""
        return Panel(Text(reason, "bold red"), title=f"blink top · {self._place}", border_style="red")

    def _remember(self, figures: Figures) -> None:
        ttft, tpot = (pair[0] if pair else 0.0 for pair in (figures.ttft, figures.tpot))
        newest = {
            "tokens": figures.token_rate,
            "running": sum(figures.running.values()),
            "kv": figures.kv_use,
            "ttft": ttft,
            "tpot": tpot,
            "step": figures.step_seconds or 0.0,
            "watts": figures.watts or 0.0,
        }
        newest |= {row.title: row.charted for row in figures.rows if row.charted is not None}
        for name, value in newest.items():
            self._past.setdefault(name, deque(maxlen=_HISTORY)).append(value)

    def _chart(self, name: str, top: float = 0.0) -> Text:
        return Text(draw_bars(self._past[name], top), "cyan")

    def _head(self, figures: Figures) -> RenderableType:
        state = Text("up", "bold green") if figures.is_up else Text("engine away", "bold red")
        return Text.assemble(
            (figures.model or "no model", "bold"), "  ", state, f"  {self._place}  last {figures.seconds:.1f} s"
        )

    def _load(self, figures: Figures) -> RenderableType:
        table = _table("load", "now", "last minute")
        for kind in CLASSES:
            counts = f"{figures.running[kind]:.0f} running, {figures.waiting[kind]:.0f} waiting"
            table.add_row(kind.replace("_", "-"), counts, self._chart("running") if kind == CLASSES[0] else "")
        table.add_row(
            "tokens/s", f"{figures.token_rate:,.1f} out, {figures.prompt_rate:,.1f} in", self._chart("tokens")
        )
        table.add_row("first token", _pair(figures.ttft), self._chart("ttft"))
        table.add_row("time per token", _pair(figures.tpot), self._chart("tpot"))
        table.add_row("KV cache", f"{figures.kv_use:.1%} used", self._chart("kv", 1.0))
        table.add_row("prefix cache", _percent(figures.cache_hit_rate, "of prompt tokens found"), "")
        ended = ", ".join(f"{rate:.1f} {reason}" for reason, rate in figures.finished.items() if rate)
        table.add_row("finished/s", ended or "0", "")
        return table

    def _steps(self, figures: Figures) -> RenderableType:
        table = _table("steps", "now", "last minute")
        table.add_row("steps/s", f"{figures.step_rate:,.1f}", "")
        table.add_row("a step takes", format_seconds(figures.step_seconds), self._chart("step"))
        table.add_row("to the next launch", format_seconds(figures.scheduling_seconds), "")
        table.add_row("model at work", f"{figures.busy:.1%} of the time", "")
        tokens = _NOTHING if figures.tokens_per_step is None else f"{figures.tokens_per_step:,.1f}"
        table.add_row("tokens in a step", f"{tokens}, {_percent(figures.padded, 'padding')}", "")
        for row in figures.rows:
            if row.text:
                table.add_row(row.title, row.text, "" if row.charted is None else self._chart(row.title))
        table.add_row("preemptions/s", f"{figures.preemption_rate:.1f}", "")
        if figures.watts is not None:
            table.add_row("GPU's power", f"{figures.watts:.0f} W", self._chart("watts"))
        if figures.joules_per_token is not None:
            table.add_row("energy per token", f"{figures.joules_per_token:.3g} J in the last minute", "")
        return table


def _table(*columns: str) -> Table:
    table = Table(*columns, expand=False, show_edge=False, pad_edge=False)
    table.columns[0].min_width, table.columns[1].min_width = 20, 34
    return table


def _frontends(figures: Figures) -> RenderableType:
    table = Table("frontend", "sequences", "waiting", "tokens/s", show_edge=False, pad_edge=False)
    for each in figures.frontends:
        table.add_row(
            f"process {each.name}", f"{each.sequences:.0f}", f"{each.waiting:.0f}", f"{each.tokens_per_second:,.1f}"
        )
    return table


def _pair(values: tuple[float, float] | None) -> str:
    return _NOTHING if values is None else f"p50 {format_seconds(values[0])}, p99 {format_seconds(values[1])}"


def _percent(part: float | None, text: str) -> str:
    return _NOTHING if part is None else f"{part:.1%} {text}"


def format_seconds(seconds: float | None) -> str:
    """Return a duration with a unit that suits it."""
    if seconds is None:
        return _NOTHING
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def draw_bars(values: Iterable[float], top: float = 0.0) -> str:
    """Return one character for each value, its height in proportion to `top`, or to the largest if that is 0."""
    shown = list(values)
    most = top or max(shown, default=0.0)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] if most else _BARS[0] for value in shown)
