# SPDX-License-Identifier: Apache-2.0
"""Dashboard and rules ask for metrics that the server has, with labels that these have."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics
from blink.region.layout import STATISTICS
from dashboard import DEPLOY, RULES, dashboard_queries


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample that /metrics has."""
    store = MetricStore("dashboard", NUM_VALUES, tmp_path_factory.mktemp("metrics"))
    metrics = Metrics(store, [lambda: dict.fromkeys((*(STATISTICS.names or ()), "energy_mj", "token_energy_uj"), 1)])
    metrics.model_name = "m"
    families = text_string_to_metric_families(metrics.render().decode())
    found = {sample.name: {*sample.labels} for family in families for sample in family.samples}
    store.close()
    return found


def test_every_metric_that_is_asked_for_exists(labels_of: dict[str, set[str]]) -> None:
    queries = "\n".join(expr for _, expr in dashboard_queries("1m")) + RULES.read_text()
    asked = set(re.findall(r"\b(?:vllm|blink):\w+", queries))
    assert len(asked) > 25 and asked - set(labels_of) == set()


def test_every_label_that_a_query_groups_by_exists(labels_of: dict[str, set[str]]) -> None:
    known = set[str]().union(*labels_of.values()) | {"instance"}
    grouped = {
        label.strip()
        for _, expr in dashboard_queries("1m")
        for group in re.findall(r"by \(([\w, ]+)\)", expr)
        for label in group.split(",")
    }
    assert {"le", "class", "frontend"} <= grouped <= known


def test_panels_do_not_lie_on_each_other() -> None:
    panels = json.loads((DEPLOY / "grafana" / "blink.json").read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    alerts = RULES.read_text().split("- alert: ")[1:]
    assert len(alerts) >= 5
    assert all("summary:" in alert and "action:" in alert and "severity:" in alert for alert in alerts)
