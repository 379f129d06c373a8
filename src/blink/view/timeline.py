# SPDX-License-Identifier: Apache-2.0
"""`blink trace`: an engine's steps as a timeline for Perfetto and chrome://tracing (the Trace Event Format)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from blink.errors import ConfigError, EngineUnavailableError
from blink.region.report import RegionReport, only_region
from blink.view.config import TraceConfig

_LOOK_SECONDS = 0.1  # the ring holds thousands of steps
_PROCESS, _STEPS, _SCHEDULER = 1, 1, 2
_COUNTERS = {
    "sequences": {"running": "num_running", "waiting": "num_waiting"},
    "tokens in the step": {"prompt": "num_prompt_tokens", "decode": "num_decode_rows"},
    "free KV blocks": {"blocks": "num_free_blocks"},
}
_SHOWN = ("step", "num_rows", "num_tokens", "num_decode_rows", "num_prompt_tokens", "bucket")
_SHOWN += ("num_best_effort_rows", "predicted_ns", "segment", "num_segments")  # of engines that have them
_Event = dict[str, Any]


def run_trace(config: TraceConfig) -> int:
    """Write the timeline of an engine of this machine; return the exit status.

    Raises:
        BlinkError: there is no such engine, it has run no step, or the file cannot be written.
    """
    report = RegionReport(config.region or only_region())
    try:
        steps = report.trace() if config.duration == 0 else _follow(report, config.duration)
        if not len(steps):
            raise EngineUnavailableError("the engine has run no step yet: send it a request, or give --duration")
        document = build_timeline(steps, report)
    finally:
        report.close()
    try:
        Path(config.output).write_bytes(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))
    except OSError as error:
        raise ConfigError(f"cannot write {config.output}: {error.strerror}") from error
    lost = int(steps["step"][-1] - steps["step"][0]) + 1 - len(steps)
    seconds = int(steps["launched_ns"][-1] - steps["retired_ns"][0]) / 1e9
    print(f"{config.output}: {len(steps)} steps in {seconds:.2f} s" + (f", {lost} missed" if lost else ""))
    return 0


def _follow(report: RegionReport, seconds: float) -> npt.NDArray[np.void]:
    """Collect the steps that are launched within some seconds."""
    begin = report.trace()
    newest = int(begin["step"][-1]) if len(begin) else 0
    parts: dict[int, np.void] = {}
    deadline = time.monotonic() + seconds
    while True:
        entries = report.trace()
        known = max(newest, max(parts, default=0) - 1)  # the last one may have ended since
        parts |= {int(entry["step"]): entry for entry in entries[entries["step"] > known]}
        left = deadline - time.monotonic()
        if left <= 0:
            return np.array([parts[step] for step in sorted(parts)], begin.dtype)
        time.sleep(min(_LOOK_SECONDS, left))


def build_timeline(steps: npt.NDArray[np.void], report: RegionReport) -> dict[str, Any]:
    """Return the document of some steps (dtype layout.TRACE_ENTRY, ascending). Its times begin with the first."""
    origin = int(steps["retired_ns"][0])
    graphs, num_decode = report.geometry["graphs"], int(report.geometry["num_decode_graphs"])
    num_plain = int(report.geometry["num_plain_graphs"])
    events = [*_names(report.model)]
    for entry in steps:
        step = {name: int(entry[name]) for name in entry.dtype.names or ()}
        step["num_prompt_tokens"] = step["num_tokens"] - step["num_decode_rows"]
        step["bucket"] = int(graphs[step["graph"]]["tokens"])
        step["is_decode"] = step["graph"] % num_plain < num_decode
        events += _step_events(step, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": report.model, "region": report.name}}


def _names(model: str) -> Iterator[_Event]:
    for kind, thread, name in (
        ("process_name", 0, f"Blink: {model}"),
        ("thread_name", _STEPS, "model: steps"),
        ("thread_name", _SCHEDULER, "scheduler"),
    ):
        yield {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _step_events(step: dict[str, int], origin: int) -> Iterator[_Event]:
    began, launched = ((step[name] - origin) / 1000 for name in ("retired_ns", "launched_ns"))
    arguments = {name: step[name] for name in _SHOWN if name in step}
    yield _slice("retire, admit, compose, launch", _SCHEDULER, began, launched, {"step": step["step"]})
    if step["ended_ns"]:
        name = f"{'decode' if step['is_decode'] else 'mixed'} {step['bucket']}"
        if step.get("num_segments"):
            name += f", part {step['segment'] + 1} of {step['num_segments']}"
        yield _slice(name, _STEPS, launched, (step["ended_ns"] - origin) / 1000, arguments)
    for name, count in (("admitted", step["num_admitted"]), ("preempted", step["num_preempted"])):
        if count:
            event = {"ph": "i", "s": "t", "name": f"{count} {name}", "cat": name, "ts": launched}
            yield {**event, "pid": _PROCESS, "tid": _SCHEDULER, "args": {"step": step["step"], "count": count}}
    for name, fields in _COUNTERS.items():
        values = {label: step[field] for label, field in fields.items()}
        yield {"ph": "C", "name": name, "pid": _PROCESS, "ts": launched, "args": values}


def _slice(name: str, thread: int, start: float, end: float, arguments: dict[str, int]) -> _Event:
    event = {"ph": "X", "name": name, "cat": "step", "pid": _PROCESS, "tid": thread}
    return {**event, "ts": start, "dur": end - start, "args": arguments}
