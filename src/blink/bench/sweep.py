# SPDX-License-Identifier: Apache-2.0
"""`blink bench` from its options to its exit status: each rate alone, then with busy neighbours, then the report."""

from __future__ import annotations

from collections.abc import Iterator

from blink.bench.burners import Burners
from blink.bench.config import BenchConfig, UsageConfig
from blink.bench.measurement import Measurement, measure
from blink.bench.progress import ProgressLine, say
from blink.bench.report import build_document, describe_records, result_path, save
from blink.bench.summary import Summary, summarise
from blink.bench.table import format_table, make_table
from blink.bench.target import Target
from blink.bench.usage import UsageMeter, is_this_host
from blink.bench.workload import Workload
from blink.errors import BlinkError, ConfigError
from blink.host.cpu_time import ProcessTrees
from blink.host.isolation import parse_cpus
from blink.host.nvml import Gpu

_CONDITIONS = ("isolated", "interfered")


def run_bench(config: BenchConfig) -> int:
    """Measure all rates; return 0 when every run had an answer, 130 after Ctrl-C, which keeps the runs that ended.

    Raises:
        BlinkError: an option makes no sense, or there is no such server.
    """
    sweep = _Sweep(config)
    runs: list[Summary] = []
    interrupted = False
    try:
        for run in sweep.measure_all():
            runs.append(run)
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: the run under way is dropped")
    if runs:
        print(format_table(make_table(runs, config.result)))
        for path in save(build_document(config, sweep.model, runs), config, sweep.path) if sweep.path else ():
            say(f"saved {path}")
    if interrupted:
        return 130  # as shells report SIGINT
    return 0 if all(run["completed"] for run in runs) else 1


class _Sweep:
    def __init__(self, config: BenchConfig) -> None:
        # What is wrong with the options is said before anything starts.
        self._config = config
        self._rates = config.load.rates
        self._client_cpus = parse_cpus(config.client.client_cpus)
        self._burner_cpus = parse_cpus(config.interference.interference_cpus)
        if self._burner_cpus and not config.interference.interference:
            raise ConfigError("--interference-cpus needs --interference")
        _ = config.result.metrics, config.result.percentiles
        self.path = result_path(config.result)
        target = Target(config.server)
        self.model = target.model
        self._endpoint = target.resolved()
        self._workload = Workload(config, target)
        self._meter = _open_meter(config.usage, is_here=is_this_host(self._endpoint.host))
        if self._workload.guesses_lengths:
            say("the server does not tokenize: lengths are guessed, one token for four bytes")

    def measure_all(self) -> Iterator[Summary]:
        """Yield the figures of one run after another."""
        self._warm_up()
        for index in range(len(self._rates)):
            yield from self._run(index, 0)
            if self._config.interference.interference:
                with Burners(self._config.interference.interference, self._burner_cpus):
                    yield from self._run(index, 1)

    def _warm_up(self) -> None:
        requests = self._workload.plan_warmups()
        records = measure(self._endpoint, requests, cpus=self._client_cpus).records if requests else []
        errors = [record.error for record in records if record.outcome != "ok"]
        if errors:
            raise BlinkError(f"a warm-up request failed: {errors[0]}")

    def _run(self, rate_index: int, condition: int) -> list[Summary]:
        client = self._config.client
        requests = self._workload.plan(rate_index, condition)
        rate, name = self._rates[rate_index], _CONDITIONS[condition]
        if not requests:
            raise ConfigError(f"at {rate:g} requests per second none is sent: give a longer --duration")
        line = ProgressLine(f"{rate:g} req/s, {name}", len(requests))
        measurement = measure(
            self._endpoint,
            requests,
            processes=min(client.client_processes, len(requests)),
            cpus=self._client_cpus,
            meter=self._meter,
            on_progress=line.show,
        )
        line.clear()
        return [self._describe(part, rate, name, kind) for kind, part in measurement.split().items()]

    def _describe(self, measurement: Measurement, rate: float, condition: str, kind: str) -> Summary:
        run: Summary = {"condition": condition, "request_rate": rate} | ({"class": kind} if kind else {})
        run |= summarise(measurement, self._config.result.percentiles)
        of = f", {kind}" if kind else ""
        say(f"{rate:g} req/s, {condition}{of}: {run['completed']} ok, {run['failed'] + run['rejected']} bad")
        for error, number in run["errors"].items():
            say(f"  {number} x {error}")
        for warning in run["warnings"]:
            say(f"  {warning}")
        if self._config.result.save_detailed:
            run["requests"] = describe_records(measurement.records)
        return run


def _open_meter(config: UsageConfig, *, is_here: bool) -> UsageMeter:
    """Return what reads the server's usage; is_here: whether it runs on this host.

    Raises:
        ConfigError: an option is no list of numbers, or a process of the server's is not there.
    """
    indices = config.gpus
    if not is_here:
        if config.pids:
            raise ConfigError("--server-pids: the server's address is another host's")
        say("no power is read: the server's address is another host's")
        return UsageMeter()
    processes = ProcessTrees(config.pids) if config.pids else None
    try:
        return UsageMeter(tuple(Gpu(index) for index in indices), processes)
    except BlinkError as error:
        say(f"no power is read: {error.message}")
        return UsageMeter(processes=processes)
