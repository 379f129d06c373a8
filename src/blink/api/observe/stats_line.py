# SPDX-License-Identifier: Apache-2.0
"""A log line every ten seconds that says what the server does, in vLLM's words; silent while it does nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from blink.api.observe.engine_metrics import cache_usage
from blink.api.observe.metric_store import MetricStore
from blink.link.group import add_stats

_INTERVAL = 10.0  # seconds

logger = logging.getLogger(__name__)


class StatsLine:
    """Write the line for one server: of its workers, the one with the lowest process id does."""

    def __init__(self, store: MetricStore, engine_stats: Sequence[Callable[[], Mapping[str, int]]]) -> None:
        """Look at a store, and at the statistics of each engine."""
        self._store = store
        self._engine_stats = engine_stats
        self._before: list[Mapping[str, int]] = []
        self._at = -_INTERVAL

    def look(self, now: float) -> None:
        """Write the line if it is due at `now` (seconds); call it now and then."""
        if now - self._at < _INTERVAL:
            return
        each = [read() for read in self._engine_stats]
        pairs, seconds = [*zip(self._before, each, strict=False)], now - self._at
        self._before, self._at = each, now
        # An engine that is away, or another one, tells nothing.
        same = [(old, new) for old, new in pairs if old and new and new["num_steps"] >= old["num_steps"]]
        if not same:
            return
        before, stats = (add_stats(side) for side in zip(*same, strict=True))
        is_idle = stats["num_steps"] == before["num_steps"] and stats["num_running"] + stats["num_waiting"] == 0
        if is_idle or os.getpid() != min(worker.pid for worker in self._store.workers() if worker.is_alive):
            return
        figures = _measure(before, stats, seconds)
        text = (
            "Avg prompt throughput: {prompt_throughput:.1f} tokens/s, Avg generation throughput: "
            "{generation_throughput:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
            "KV cache usage: {kv_cache_usage:.1%}, Prefix cache hit rate: {prefix_cache_hit_rate:.1%}"
        )
        logger.info("%s", text.format(**figures), extra={"fields": figures})


def _measure(before: Mapping[str, int], now: Mapping[str, int], seconds: float) -> dict[str, float]:
    grown = {name: now[name] - before[name] for name in now}
    return {
        "prompt_throughput": grown["prompt_tokens"] / seconds,
        "generation_throughput": grown["generation_tokens"] / seconds,
        "running": now["num_running"],
        "waiting": now["num_waiting"],
        "kv_cache_usage": cache_usage(now),
        "prefix_cache_hit_rate": grown["prefix_hits"] / max(1, grown["prefix_queries"]),
    }
