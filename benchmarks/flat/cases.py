# SPDX-License-Identifier: Apache-2.0
"""The cases of the protocol, in their order, and how one is measured: the server, then the client against itself."""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from blink.bench.arrivals import draw_arrivals
from blink.bench.measurement import Measurement, measure
from blink.bench.record import Endpoint, PlannedRequest, Progress
from blink.bench.summary import latencies
from blink.bench.workload import Workload
from flat.burn import STOP, Plan
from flat.kinds import KINDS, NotMeasuredError
from flat.machine import process_tree, read_pressure
from flat.neighbours import Neighbours, program
from flat.quantiles import describe, histogram

if TYPE_CHECKING:
    from flat.steps import StepWatch

AWAY: Final = "away"
STOP_ENGINE: Final = "stop-engine"
STOP_FRONTEND: Final = "stop-frontend"
CONTROLS: Final = {
    AWAY: "compute, on cores that the server does not have",
    STOP_ENGINE: "the engine's process is stopped",
    STOP_FRONTEND: "the frontend's process is stopped",
}
FAKE_GAP_MS: Final = 5.0
_FAKE_EVENTS: Final = 40
_FAKE_RATE: Final = 16.0
_UNTIL_STOPPED: Final = 0.5
_STOP_SECONDS: Final = {STOP_ENGINE: 10.0, STOP_FRONTEND: 2.0}  # a frontend is started again after 3 s of silence


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    kind: str  # of KINDS or CONTROLS
    dose: float  # neighbours per core
    rate: float  # requests per second
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cases have in common."""

    endpoint: Endpoint
    workloads: Sequence[Workload]  # one a run; their rates are `rates`
    rates: Sequence[float]
    duration: float
    neighbour_cpus: Sequence[int]
    server_cores: Sequence[int]
    folder: str  # where neighbours write
    fake_port: int
    server_pid: int = 0
    stop_engine: int = 0
    stop_frontend: int = 0
    trace: str | None = None  # region; empty: the only one of this machine


def order_cases(
    kinds: Sequence[str], doses: Sequence[float], rates: Sequence[float], runs: int, seed: int, controls: Sequence[str]
) -> list[Case]:
    """Return every combination, in random order where there are several runs; controls are the last of each run."""
    cases: list[Case] = []
    for run in range(runs):
        part = [Case(kind, dose, rate, run) for rate in rates for kind in kinds for dose in doses]
        if runs > 1:
            random.Random(seed * 1000 + run).shuffle(part)
        middle = sorted(rates)[len(rates) // 2]
        cases += part + [Case(name, max(doses) if name == AWAY else 0.0, middle, run) for name in controls]
    return cases


def num_neighbours(dose: float, cores: int) -> int:
    """Return how many processes a dose is: at least one, unless it is 0."""
    return max(1, round(dose * cores)) if dose else 0


def plan_neighbours(case: Case, setting: Setting) -> Plan:
    """Say which neighbours a case has.

    Raises:
        NotMeasuredError: it cannot be measured with this setting.
    """
    cpus = setting.neighbour_cpus
    plan = Plan(kind=case.kind, number=num_neighbours(case.dose, len(cpus)), cpus=cpus, folder=setting.folder)
    if case.kind == AWAY:
        away = [cpu for cpu in cpus if cpu not in setting.server_cores]
        if not setting.server_cores or not away:
            raise NotMeasuredError("--server-cores leaves no core for the neighbours")
        return replace(plan, kind="compute", number=num_neighbours(case.dose, len(away)), cpus=away)
    if case.kind in _STOP_SECONDS:
        pid = setting.stop_engine if case.kind == STOP_ENGINE else setting.stop_frontend
        if not pid:
            raise NotMeasuredError(f"give --{case.kind} PID")
        seconds = min(_STOP_SECONDS[case.kind], setting.duration / 2)
        return replace(plan, kind=STOP, number=1, pids=[pid], seconds=seconds)
    if case.kind == "throttle" and setting.server_pid:
        return replace(plan, pids=process_tree(setting.server_pid))
    return plan


def measure_case(case: Case, number: int, setting: Setting) -> dict[str, Any]:
    """Measure one case; `number` tells its prompts from other cases'. What this machine cannot do has a reason."""
    result: dict[str, Any] = asdict(case)
    try:
        plan = plan_neighbours(case, setting)
        with Neighbours(plan) as neighbours:
            result |= {"processes": plan.number, **_measure_server(case, number, setting, neighbours, plan)}
            # Neighbours are still at work.
            result["client"] |= measure_client(setting.fake_port, min(2.0, setting.duration / 4))
        if plan.kind == STOP and not neighbours.done["work"]:
            raise NotMeasuredError("the load ended before the stop did")
        return {**result, "neighbours": neighbours.done}
    except NotMeasuredError as error:
        return {**result, "not_measured": str(error)}


def _measure_server(case: Case, number: int, setting: Setting, neighbours: Neighbours, plan: Plan) -> dict[str, Any]:
    requests = setting.workloads[case.run].plan(list(setting.rates).index(case.rate), number)
    watch = None if setting.trace is None else _watch_steps(setting.trace)
    stops = list[float]()

    def begin_stop(_: Progress) -> None:
        if plan.kind == STOP and not stops:
            neighbours.go()
            stops.append(time.monotonic())

    pressure, began = read_pressure(), time.monotonic()
    measurement = measure(setting.endpoint, requests, on_progress=begin_stop)
    seconds, after = time.monotonic() - began, read_pressure()
    found = summarise(measurement)
    if stops:
        tokens = _count_after(measurement, stops[0], plan.seconds)
        found |= {"stopped_seconds": plan.seconds, "tokens_while_stopped": tokens}
    if watch:
        found["trace"] = _summarise_trace(watch)
    if pressure is None or after is None:
        return {**found, "seconds": seconds}
    return {**found, "seconds": seconds, "psi_cpu_some": [pressure, after], "psi_share": (after - pressure) / seconds}


def _count_after(measurement: Measurement, stop: float, seconds: float) -> int:
    """Count the tokens while a process was stopped: within `seconds` of the order, but for the time until it acts."""
    first = stop - measurement.start
    times = [when for record in measurement.records for when in record.times]
    return sum(first + _UNTIL_STOPPED < when < first + seconds for when in times)


def summarise(measurement: Measurement) -> dict[str, Any]:
    """Return the figures of a load, of all answers with a token: one that was not complete in time counts as well."""
    records = measurement.records
    found = latencies([record for record in records if record.times])
    itl = np.asarray(found["itl"]) * 1e3
    lags = [record.sent - record.at for record in records]
    return {
        "requests": {
            "planned": len(records),
            **{name: sum(one.outcome == name for one in records) for name in ("ok", "failed", "rejected")},
            "errors": dict(Counter(one.error for one in records if one.error).most_common(5)),
            "tokens": sum(one.output_tokens or len(one.times) for one in records),
        },
        "ttft_ms": describe([value * 1e3 for value in found["ttft"]]),
        "tpot_ms": describe([value * 1e3 for value in found["tpot"]]),
        "gap_ms": describe(itl.tolist()),
        "gap_histogram": histogram(itl.tolist()),
        "client": {
            "send_lag_ms": describe([value * 1e3 for value in lags]),
            "loop_lag_ms": describe([value * 1e3 for value in measurement.loop_lags]),
        },
    }


def measure_client(port: int, seconds: float) -> dict[str, Any]:
    """Load the fake server: its gaps are FAKE_GAP_MS, so what differs is the error of client, loopback and sleep."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: fake\r\nContent-Length: 2\r\n\r\n{}"
    times = draw_arrivals(_FAKE_RATE, seconds, 0, np.random.default_rng(7)) or [0.0]
    requests = [PlannedRequest(index, at, head, 1, _FAKE_EVENTS) for index, at in enumerate(times)]
    measurement = measure(Endpoint(host="127.0.0.1", port=port, tls=False, timeout=60.0), requests)
    found = latencies([record for record in measurement.records if record.times])
    gaps = np.asarray(found["itl"]) * 1e3
    return {
        "fake_ttft_ms": describe([value * 1e3 for value in found["ttft"]]),
        "fake_gap_error_ms": describe(np.abs(gaps - FAKE_GAP_MS).tolist()),
        "fake_gap_histogram": histogram(gaps.tolist()),
    }


def find_reasons(kinds: Sequence[str], setting: Setting) -> dict[str, str]:
    """Start and end one neighbour of each kind; return why some cannot run here."""
    reasons: dict[str, str] = {}
    for kind in kinds:
        try:
            with Neighbours(plan_neighbours(Case(kind, 1 / len(setting.neighbour_cpus), 1.0, 0), setting)):
                pass
        except NotMeasuredError as error:
            reasons[kind] = str(error)
    return reasons


def start_fake_server(parent: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start the fake server; return it and its port."""
    command, environment = program("fake_server")
    words = [*command, str(FAKE_GAP_MS), str(_FAKE_EVENTS), str(parent)]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def _watch_steps(region: str) -> StepWatch:
    from flat.steps import StepWatch  # needs Blink's native library, without which other servers are measured

    return StepWatch(region)


def _summarise_trace(watch: StepWatch) -> dict[str, Any]:
    from flat.steps import step_gaps

    steps, missed = watch.finish()
    gaps = step_gaps(steps)
    return {
        "steps": len(steps),
        "missed": missed,
        "gap_ms": describe(gaps.tolist()),
        "gap_histogram": histogram(gaps.tolist()),
    }


def title_of(kind: str) -> str:
    """Return the name of a kind or control in tables."""
    return KINDS[kind].title if kind in KINDS else CONTROLS[kind]
