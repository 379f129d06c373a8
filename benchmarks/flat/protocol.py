# SPDX-License-Identifier: Apache-2.0
"""The protocol from its options to its files: every case in turn, all files written anew after each."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx

from blink.bench.config import BenchConfig, LoadConfig, ServerConfig
from blink.bench.measurement import measure
from blink.bench.target import Target
from blink.bench.workload import Workload
from blink.errors import BlinkError, ConfigError
from blink.host.isolation import parse_cpus
from flat.cases import (
    AWAY,
    STOP_ENGINE,
    STOP_FRONTEND,
    Case,
    Setting,
    find_reasons,
    measure_case,
    order_cases,
    start_fake_server,
)
from flat.charts import draw_doses, draw_gaps
from flat.machine import describe_machine, describe_software
from flat.options import read_options
from flat.report import format_csv, format_table
from flat.serving import Served, serve

_SLACK_SECONDS = 6.5  # of a case, beside the load itself: starts, last answers, the client alone


def run(arguments: Sequence[str]) -> int:
    """Measure what the arguments say; return 0, 1 if a case had no answer, 2 after an error, 130 after Ctrl-C."""
    options = read_options(arguments)
    try:
        with ExitStack() as stack:
            return _run(options, stack)
    except BlinkError as error:
        print(f"flat: error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as shells report SIGINT; the cases that ended are saved


def _run(options: argparse.Namespace, stack: ExitStack) -> int:
    client_cpus, server_cpus, neighbour_cpus = share_cores(options)
    served = None if options.url else stack.enter_context(serve(options.serve, server_cpus))
    if client_cpus:
        os.sched_setaffinity(0, client_cpus)  # the clients and the fake server are children
    url = served.url if served else options.url
    target = Target(ServerConfig(base_url=url, model=options.model, request_timeout=options.request_timeout))
    setting = _make_setting(options, target, served, neighbour_cpus, stack)
    controls = [AWAY] if options.server_cores else []
    controls += [STOP_ENGINE] if setting.stop_engine else []
    controls += [STOP_FRONTEND] if setting.stop_frontend else []
    cases = order_cases(options.kinds, options.doses, options.rates, options.runs, options.seed, controls)
    result: dict[str, Any] = {
        "command": ["benchmarks/flat/run.py", *options.arguments],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_software(),
        "machine": describe_machine(),
        "server": {
            "url": options.url,
            "command": served.command if served else "",
            "model": target.model,
            "version": _version_of(url),
        },
        "protocol": {
            **{name: getattr(options, name) for name in ("kinds", "doses", "rates", "duration", "runs", "seed")},
            **{name: getattr(options, name) for name in ("mean_input_len", "mean_output_len", "request_timeout")},
            "client_cpus": client_cpus,
            "neighbour_cpus": neighbour_cpus,
            "server_cores": list(setting.server_cores),
        },
        "cases": [],
    }
    minutes = len(cases) * (options.duration + _SLACK_SECONDS) / 60
    _say(f"{len(cases)} cases, about {minutes:.0f} minutes; results are in {options.out} after each")
    _warm_up(setting)
    reasons = find_reasons(options.kinds, setting)
    return measure_all(cases, reasons, setting, result, options.out)


def measure_all(
    cases: Sequence[Case], reasons: Mapping[str, str], setting: Setting, result: dict[str, Any], out: Path
) -> int:
    """Measure the cases one after another and keep the files up to date; return the exit status.

    reasons: why kinds cannot be measured.
    """
    for number, case in enumerate(cases, 1):
        if case.kind in reasons:
            found = {**asdict(case), "not_measured": reasons[case.kind]}
        else:
            found = measure_case(case, number, setting)
        result["cases"].append(found)
        write_files(result, out)
        _say(f"{number}/{len(cases)} {_describe(found)}")
    print(format_table(result))
    return 0 if all(case["ttft_ms"] for case in result["cases"] if "ttft_ms" in case) else 1


def write_files(result: dict[str, Any], out: Path) -> None:
    """Write the result as JSON and CSV, and its two pictures."""
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "results.csv").write_text(format_csv(result))
    (out / "flat-dose.svg").write_text(draw_doses(result) + "\n")
    (out / "flat-gaps.svg").write_text(draw_gaps(result) + "\n")


def share_cores(options: argparse.Namespace) -> tuple[list[int], list[int], list[int]]:
    """Return the cores of client, server and neighbours.

    If not told otherwise, the client has the last quarter of the cores, four at most, none of fewer than four; server
    and neighbours share the others.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if options.client_cpus == "auto":
        number = min(4, len(allowed) // 4)
        client = allowed[len(allowed) - number :]
    else:
        client = list(parse_cpus(options.client_cpus))
    others = [cpu for cpu in allowed if cpu not in client] or allowed
    neighbours = list(parse_cpus(options.neighbour_cpus)) or others
    server = list(parse_cpus(options.server_cores)) or others
    for cpus in (client, neighbours, server):
        if missing := sorted(set(cpus) - set(allowed)):
            raise ConfigError(f"cores {missing} are not this process's to use: {allowed}")
    return client, server, neighbours


def _make_setting(
    options: argparse.Namespace, target: Target, served: Served | None, neighbour_cpus: list[int], stack: ExitStack
) -> Setting:
    loads = [
        LoadConfig(
            request_rate=",".join(f"{rate:g}" for rate in options.rates),
            duration=options.duration,
            mean_input_len=options.mean_input_len,
            mean_output_len=options.mean_output_len,
            prompt_format=options.prompt_format,
            seed=options.seed + run,
        )
        for run in range(options.runs)
    ]
    fake, port = start_fake_server(os.getpid())
    stack.callback(fake.wait)
    stack.callback(fake.kill)
    options.out.mkdir(parents=True, exist_ok=True)
    # A stopped CPU engine stops, so that its server would end it: there it is no control.
    is_on_gpu = served is not None and "cuda" in " ".join(options.serve)
    return Setting(
        endpoint=target.resolved(),
        workloads=[Workload(BenchConfig(load=load), target) for load in loads],
        rates=options.rates,
        duration=options.duration,
        neighbour_cpus=neighbour_cpus,
        server_cores=parse_cpus(options.server_cores),
        folder=str(options.out.resolve()),
        fake_port=port,
        server_pid=served.pid if served else options.server_pid,
        stop_engine=options.stop_engine or (served.find("engine") if served and is_on_gpu else 0),
        stop_frontend=options.stop_frontend,
        trace=served.region if served else options.trace,
    )


def _warm_up(setting: Setting) -> None:
    errors = [one.error for one in measure(setting.endpoint, setting.workloads[0].plan_warmups()).records if one.error]
    if errors:
        raise BlinkError(f"a warm-up request failed: {errors[0]}")


def _version_of(url: str) -> str | None:
    try:
        return httpx.get(f"{url.rstrip('/')}/version", timeout=5.0, trust_env=False).json()["version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def _describe(case: dict[str, Any]) -> str:
    name = f"{case['kind']}, {case['dose']:g} per core, {case['rate']:g} req/s, run {case['run'] + 1}: "
    if "not_measured" in case:
        return f"{name}not measured: {case['not_measured']}"
    tpot, requests = case["tpot_ms"], case["requests"]
    found = f"TPOT {tpot['p50']:.2f} / {tpot['p99']:.2f} ms, " if tpot else ""
    alive, doubt = case["neighbours"]["alive"], ""
    if alive < case["processes"]:
        doubt = f"; DOUBTFUL: only {alive} of {case['processes']} neighbours lived to the end"
    return f"{name}{found}{requests['ok']} of {requests['planned']} answered{doubt}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} flat: {text}", file=sys.stderr, flush=True)
