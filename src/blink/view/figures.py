# SPDX-License-Identifier: Apache-2.0
"""What two samples of the metrics say about the time between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blink.api.observe import metrics as names
from blink.api.observe.engine_metrics import CLASSES
from blink.view.draft_figures import DraftFigures, FigureRow, compare_drafts, list_rows
from blink.view.samples import Samples


@dataclass(frozen=True, slots=True)
class FrontendFigures:
    """One frontend now."""

    name: str
    sequences: float
    waiting: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The state of a server; rates and times are those of `seconds`. None: nothing happened that it could tell of."""

    seconds: float
    model: str
    is_up: bool
    running: Mapping[str, float]  # by class
    waiting: Mapping[str, float]
    kv_use: float  # 0 to 1
    prompt_rate: float  # tokens per second
    token_rate: float
    finished: Mapping[str, float]  # sequences per second by reason
    preemption_rate: float
    cache_hit_rate: float | None  # of the prompt tokens
    ttft: tuple[float, float] | None  # seconds, p50 and p99
    tpot: tuple[float, float] | None
    step_rate: float  # per second
    step_seconds: float | None  # mean
    scheduling_seconds: float | None  # mean between two steps
    busy: float  # part of the time in which a step was in flight
    tokens_per_step: float | None
    padded: float | None  # part of a step's places without a token
    drafts: DraftFigures | None  # None: the server has never verified one
    watts: float | None  # of the engine's GPU
    joules_per_token: float | None  # of the last minute, whatever `seconds` is
    frontends: tuple[FrontendFigures, ...]

    @property
    def rows(self) -> tuple[FigureRow, ...]:
        """What the screen shows of the steps that not every server has."""
        return list_rows(self.drafts)


def compare(before: Samples, now: Samples) -> Figures:
    """Return the figures of the time between two samples of one server."""
    seconds = max(now.at - before.at, 1e-3)

    engines = [*now.by_label("blink:engine_up", "engine")]

    def grown(name: str, **labels: str) -> float:
        counts = [
            tuple(each.value(f"{name}_total", engine=engine, **labels) for each in (before, now)) for engine in engines
        ]
        return sum(_growth(old, new) for old, new in counts)

    steps, computed, padded = grown("blink:num_steps"), grown("blink:computed_tokens"), grown("blink:padded_tokens")
    running_seconds, num_engines = grown("blink:step_seconds"), max(1, len(engines))
    return Figures(
        seconds=seconds,
        model=now.model,
        is_up=now.value("blink:engine_up") > 0,
        running=_by_class(now, "blink:requests_running_by_class"),
        waiting=_by_class(now, "blink:requests_waiting_by_class"),
        kv_use=now.value("vllm:kv_cache_usage_perc") / num_engines,
        prompt_rate=grown("vllm:prompt_tokens") / seconds,
        token_rate=grown("vllm:generation_tokens") / seconds,
        finished={
            reason: grown("vllm:request_success", finished_reason=reason) / seconds for reason in names.FINISH_REASONS
        },
        preemption_rate=grown("vllm:num_preemptions") / seconds,
        cache_hit_rate=_ratio(grown("vllm:prefix_cache_hits"), grown("vllm:prefix_cache_queries")),
        ttft=_percentiles(before, now, f"vllm:{names.TTFT}"),
        tpot=_percentiles(before, now, f"vllm:{names.ITL}"),
        step_rate=steps / seconds,
        step_seconds=_ratio(running_seconds, steps),
        scheduling_seconds=_ratio(grown("blink:scheduling_seconds"), steps),
        busy=min(1.0, running_seconds / seconds / num_engines),
        tokens_per_step=_ratio(computed, steps),
        padded=_ratio(padded, computed + padded),
        drafts=compare_drafts(now, grown, seconds),
        watts=grown("blink:energy_joules") / seconds or None,
        joules_per_token=now.mean("blink:joules_per_token") or None,
        frontends=_frontends(before, now, seconds),
    )


def _by_class(samples: Samples, name: str) -> dict[str, float]:
    return {kind: samples.value(name, **{"class": kind}) for kind in CLASSES}


def _growth(old: float, new: float) -> float:
    """Return what a counter has grown by; one that fell began anew."""
    return new - old if new >= old else new


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _frontends(before: Samples, now: Samples, seconds: float) -> tuple[FrontendFigures, ...]:
    old = before.by_label("blink:frontend_tokens_total", "frontend")
    waiting = now.by_label("blink:frontend_waiting", "frontend")
    tokens = now.by_label("blink:frontend_tokens_total", "frontend")
    return tuple(
        FrontendFigures(name, count, waiting.get(name, 0), _growth(old.get(name, 0), tokens[name]) / seconds)
        for name, count in now.by_label("blink:frontend_sequences", "frontend").items()
        if name in tokens
    )


def _percentiles(before: Samples, now: Samples, name: str) -> tuple[float, float] | None:
    old, new = before.buckets(name), now.buckets(name)
    if any(new.get(bound, 0) < count for bound, count in old.items()):
        old = {}  # begun anew
    grown = {bound: count - old.get(bound, 0) for bound, count in new.items()}
    p50, p99 = quantile(grown, 0.5), quantile(grown, 0.99)
    return None if p50 is None or p99 is None else (p50, p99)


def quantile(buckets: Mapping[float, float], part: float) -> float | None:
    """Return a quantile of a histogram's cumulated counts as Prometheus does; None if they are 0."""
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    rank = part * buckets[bounds[-1]]
    place = next(i for i, bound in enumerate(bounds) if buckets[bound] >= rank)
    if bounds[place] == float("inf"):
        return bounds[place - 1] if place else None
    low, below = (bounds[place - 1], buckets[bounds[place - 1]]) if place else (0.0, 0.0)
    return low + (bounds[place] - low) * (rank - below) / (buckets[bounds[place]] - below)
