# SPDX-License-Identifier: Apache-2.0
"""From the records of one load to its figures. Names and definitions are those of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from blink.bench.config import METRICS
from blink.bench.measurement import Measurement
from blink.bench.record import Record

Summary = dict[str, Any]

PLOTTED_PERCENTILES: Final = (50.0, 99.0)
# The client's own lateness may be this share of the median time to the first token, or this many milliseconds.
_LAG_SHARE: Final = 0.1
_LAG_FLOOR_MS: Final = 3.0


def summarise(measurement: Measurement, percentiles: Iterable[float]) -> Summary:
    """Compute the figures of one load; latencies in milliseconds, of requests that succeeded only."""
    records = measurement.records
    good = [record for record in records if record.outcome == "ok"]
    duration = max((record.ended for record in records), default=0.0)
    output_tokens = sum(num_output_tokens(record) for record in good)
    input_tokens = sum(record.input_tokens or record.input_len for record in good)
    summary: Summary = {
        "completed": len(good),
        "failed": sum(record.outcome == "failed" for record in records),
        "rejected": sum(record.outcome == "rejected" for record in records),
        "errors": dict(Counter(record.error for record in records if record.error).most_common()),
        "duration": duration,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "mean_input_len": input_tokens / len(good) if good else None,
        "mean_output_len": output_tokens / len(good) if good else None,
        "request_throughput": len(good) / duration if duration else 0.0,
        "output_throughput": output_tokens / duration if duration else 0.0,
        "total_token_throughput": (input_tokens + output_tokens) / duration if duration else 0.0,
        "tokens_per_event": output_tokens / sum(len(record.times) for record in good) if good else None,
    }
    wanted = sorted({*percentiles, *PLOTTED_PERCENTILES})
    for name, seconds in latencies(good).items():
        summary |= _statistics(name, np.asarray(seconds) * 1e3, wanted)
    summary |= _usage(measurement, output_tokens) | _lateness(measurement)
    summary["warnings"] = list(_warnings(summary, good))
    return summary


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Collect TTFT, TPOT and E2EL of each request and ITL of each event after the first, in seconds."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in records:
        times = np.asarray(record.times)
        found["ttft"].append(float(times[0]) - record.sent)
        found["e2el"].append(float(times[-1]) - record.sent)
        found["itl"] += np.diff(times).tolist()
        num_tokens = num_output_tokens(record)
        if num_tokens > 1:
            found["tpot"].append(float(times[-1] - times[0]) / (num_tokens - 1))
    return found


def num_output_tokens(record: Record) -> int:
    """Return the tokens of an answer: as the server counts, else one for each event."""
    return len(record.times) if record.output_tokens is None else record.output_tokens


def percentile_key(percentile: float, metric: str) -> str:
    """Return the name of a percentile in a summary."""
    return f"p{percentile:g}_{metric}_ms"


def _statistics(name: str, values: np.ndarray, percentiles: Sequence[float]) -> Summary:
    if not len(values):
        return dict.fromkeys((f"mean_{name}_ms", *(percentile_key(p, name) for p in percentiles)))
    found = {percentile_key(p, name): float(np.percentile(values, p)) for p in percentiles}
    return {f"mean_{name}_ms": float(values.mean()), **found}


def _usage(measurement: Measurement, output_tokens: int) -> Summary:
    usage, found = measurement.usage, Summary()
    if usage.joules is not None:
        found["mean_power_w"] = usage.joules / measurement.seconds
        found["joules_per_token"] = usage.joules / output_tokens if output_tokens else None
    if usage.cpu_seconds is not None:
        found["server_cpu_s"] = usage.cpu_seconds
        found["cpu_s_per_1000_tokens"] = 1000 * usage.cpu_seconds / output_tokens if output_tokens else None
    return found


def _lateness(measurement: Measurement) -> Summary:
    sent = [record.sent - record.at for record in measurement.records]
    lags = {"send_lag": sent, "loop_lag": measurement.loop_lags}
    return {
        f"p99_{name}_ms": float(np.percentile(np.asarray(values), 99)) * 1e3 if len(values) else 0.0
        for name, values in lags.items()
    }


def _warnings(summary: Summary, good: Sequence[Record]) -> Iterable[str]:
    ttft = summary["p50_ttft_ms"]
    allowed = max(_LAG_FLOOR_MS, _LAG_SHARE * ttft) if ttft is not None else _LAG_FLOOR_MS
    for name, text in (("send_lag", "sent requests"), ("loop_lag", "looked at answers")):
        lag = summary[f"p99_{name}_ms"]
        if lag > allowed:
            yield (
                f"DOUBTFUL: the load generator itself {text} up to {lag:.1f} ms late (p99; {allowed:.1f} ms would do): "
                "give it cores of its own (--client-cpus), or more processes (--client-processes)"
            )
    if short := sum(num_output_tokens(record) < record.output_len for record in good):
        yield f"{short} answers are shorter than asked for: does the server know ignore_eos?"
    if uncounted := sum(record.output_tokens is None for record in good):
        yield f"{uncounted} answers came without usage: each event is counted as one token"
