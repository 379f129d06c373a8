# SPDX-License-Identifier: Apache-2.0
"""The queries of the Grafana dashboard and of the Prometheus rules, as an operator's tools will send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"


def dashboard_queries(rate_interval: str) -> Iterator[tuple[str, str]]:
    """Yield the panel and the expression of each query, with Grafana's variables filled in."""
    for panel in json.loads((DEPLOY / "grafana" / "blink.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", rate_interval).replace("$model", ".*")
