# SPDX-License-Identifier: Apache-2.0
"""The metrics that every program in Python has with prometheus_client: of the worker that answers a scrape."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest


def render_process() -> bytes:
    """Return the Prometheus text of process_* and python_*."""
    return generate_latest(_registry())


@cache
def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
