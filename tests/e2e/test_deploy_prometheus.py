# SPDX-License-Identifier: Apache-2.0
"""The real Prometheus in front of a loaded server: every query of the dashboard has data, every alert its moment."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboard import DEPLOY, RULES, dashboard_queries
from ports import free_port
from processes import Engine, Frontend, stop, under_load, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
_SCRAPES = 8
LOAD: dict[str, Any] = {"prompt": [*range(9, 99)], "max_tokens": 40, "ignore_eos": True, "n": 2}


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    if not shutil.which("prometheus") or not shutil.which("promtool"):
        pytest.skip("needs Prometheus (Debian: apt install prometheus)")


@contextmanager
def run_prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes `target` each second, with the rules of deploy/."""
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    text = text.replace("localhost:8000", target).replace("_interval: 5s", "_interval: 1s").replace("15s", "1s")
    (folder / "prometheus.yaml").write_text(text)
    shutil.copy(RULES, folder)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as http:
            wait_for(lambda: process.poll() is not None or _answers(http), 60)
            assert process.poll() is None, (folder / "log").read_text()
            yield http
    finally:
        stop(process)


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask(http: httpx.Client, expr: str) -> list[float]:
    """The values that a query has now."""
    response = http.get("/api/v1/query", params={"query": expr})
    answer: dict[str, Any] = response.json()
    assert answer["status"] == "success", f"{expr}: {answer}"
    return [float(row["value"][1]) for row in answer["data"]["result"]]


def test_every_query_of_the_dashboard_has_data(tiny_engine: Engine, tiny_server: Frontend, tmp_path: Path) -> None:
    del tiny_engine
    with run_prometheus(tmp_path, f"127.0.0.1:{tiny_server.port}") as http, under_load(tiny_server.url, **LOAD):
        deadline = time.monotonic() + 120
        while max(ask(http, "count_over_time(blink:engine_up[1m])"), default=0) < _SCRAPES:
            assert time.monotonic() < deadline, "Prometheus does not scrape"
            time.sleep(0.5)
        without = [
            (panel, expr)
            for panel, expr in dashboard_queries("10s")
            if not (values := ask(http, expr)) or all(math.isnan(value) for value in values)
        ]
        assert {panel for panel, _ in without} <= {"Energy per token", "Power"}  # which a CPU engine does not count
        assert ask(http, "blink:engine_up") == [1] and ask(http, 'ALERTS{alertstate="firing"}') == []
        rules = http.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert len(rules) >= 5 and {rule["health"] for rule in rules} == {"ok"}


# What a minute-by-minute history must look like for each alert to fire at its 20th minute.
_HISTORIES = {
    "BlinkServerDown": {'up{job="blink"}': "0x30"},
    "BlinkEngineAway": {"blink:engine_up": "0x30"},
    "BlinkHeartbeatStalled": {"blink:engine_up": "1x60", "blink:heartbeat_total": "77x60"},
    "BlinkQueueGrows": {"vllm:num_requests_waiting": "1+1x30"},
    "BlinkKvCacheFull": {"vllm:num_preemptions_total": "0+60x30", "vllm:kv_cache_usage_perc": "0.99x30"},
    "BlinkRefusesRequests": {'vllm:admission_rejections_total{reason="queue_full"}': "0+60x30"},
    "BlinkErrors": {'vllm:request_success_total{finished_reason="error"}': "0+6x30"},
    "BlinkFirstTokenSlow": {
        'vllm:time_to_first_token_seconds_bucket{le="5"}': "0x30",
        'vllm:time_to_first_token_seconds_bucket{le="10"}': "0+60x30",
        'vllm:time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x30",
    },
    "BlinkFrontendsLoseLeases": {"blink:expired_leases_total": "0+1x30"},
}
_SOUND = {
    'up{job="blink"}': "1x60",
    "blink:engine_up": "1x60",
    "blink:heartbeat_total": "0+60x60",
    "vllm:num_requests_waiting": "3x60",
    "vllm:num_preemptions_total": "0x60",
    "vllm:kv_cache_usage_perc": "0.99x60",
    "blink:expired_leases_total": "2x60",
}


def promtool_test(folder: Path, series: dict[str, str], alert: str, *, fires: bool) -> str:
    """Play a history of 30 minutes and look at one alert; return what promtool complains about."""
    shutil.copy(RULES, folder)
    lines = ["rule_files: [rules.yaml]", "tests:", "- interval: 30s", "  input_series:"]
    lines += [f"  - {{series: '{name}', values: '{values}'}}" for name, values in series.items()]
    lines += ["  promql_expr_test:", f'  - expr: count(ALERTS{{alertname="{alert}",alertstate="firing"}})']
    lines += ["    eval_time: 14m", "    exp_samples:" + (" [{value: 1}]" if fires else " []")]
    (folder / "test.yaml").write_text("\n".join(lines))
    run = subprocess.run(["promtool", "test", "rules", folder / "test.yaml"], capture_output=True, text=True)
    return "" if run.returncode == 0 else run.stdout + run.stderr


@pytest.mark.parametrize("alert", _HISTORIES)
def test_an_alert_fires_in_its_case_and_not_on_a_sound_server(tmp_path: Path, alert: str) -> None:
    assert promtool_test(tmp_path, _HISTORIES[alert], alert, fires=True) == ""
    assert promtool_test(tmp_path, _SOUND, alert, fires=False) == ""


def test_every_alert_has_a_history() -> None:
    named = {line.split()[-1] for line in RULES.read_text().splitlines() if "- alert:" in line}
    assert named == set(_HISTORIES)
