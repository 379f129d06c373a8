# SPDX-License-Identifier: Apache-2.0
"""Joules per token, and latency, by the target of time per output token: one server, one load, several targets.

A server of Llama-3-8B's shape with random weights gets `blink bench`'s load at each rate and each target, which the
requests carry. Target 0 is the server without pacing. Several repeats alternate the targets; the table has medians.
Joules are those of the GPU's energy counter from some seconds after the first token to the last arrival,
for at its end a run has few rows. Nothing else may use the GPU. With the defaults it takes about five minutes.

Run with: python benchmarks/pacing.py [--rates 8 32 48] [--targets 0 10 15 20] [--duration 16] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink.errors import BlinkError
from blink.host.nvml import Gpu

LLAMA = Path("src/blink/models/configs/llama-3-8b")
CLIENT_CORES = 4  # the last of the machine, where it has three times as many
START_SECONDS = 240
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "completed", "failed")
_TOKENS, _HELD = "vllm:generation_tokens_total", "blink:held_seconds_total"
HEADS = ("req/s", "target", "J/token", "of 0", "W", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "held %")


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores server and client get; empty: any."""

    server: str
    client: str


def split_cores() -> Cores:
    """Keep the client's cores apart from the server's, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 3 * CLIENT_CORES or not shutil.which("taskset"):
        return Cores("", "")
    names = [str(core) for core in cores]
    return Cores(",".join(names[:-CLIENT_CORES]), ",".join(names[-CLIENT_CORES:]))


@contextmanager
def serve(options: argparse.Namespace, cores: Cores, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block.

    Raises:
        SystemExit: it does not start; its log is printed.
    """
    command = ["taskset", "-c", cores.server] if cores.server else []
    command += [sys.executable, "-m", "blink", "serve", str(options.model), "--load-format", "dummy"]
    command += ["--skip-tokenizer-init", "--no-enable-prefix-caching", "--host", "127.0.0.1"]
    command += ["--port", str(options.port), "--region", f"pacing-{os.getpid()}", *options.serve_args]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(server, options.port, log)
        yield server
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"pacing.py: the server does not start\n{log.read_text()[-3000:]}")


@dataclass(frozen=True, slots=True)
class Reading:
    """What server and GPU have counted so far."""

    at: float
    joules: float  # NaN: nothing counts them
    tokens: float
    held: float  # seconds


def read_counters(port: int, meter: Gpu | None) -> Reading:
    """Read the server's metrics and the GPU's counter."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    tokens, held = (
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in (_TOKENS, _HELD)
    )
    return Reading(time.monotonic(), meter.read_joules() if meter else math.nan, tokens, held)


def watch(load: subprocess.Popen[str], options: argparse.Namespace, meter: Gpu | None) -> dict[str, float]:
    """Return the energy of a load that has been started, while its requests come."""
    first = read_counters(options.port, meter)
    while load.poll() is None and read_counters(options.port, meter).tokens == first.tokens:
        time.sleep(0.05)
    begun = time.monotonic()
    time.sleep(min(options.settle, options.duration / 2))
    before = read_counters(options.port, meter)
    time.sleep(max(0.0, begun + options.duration - time.monotonic()))
    after = read_counters(options.port, meter)
    seconds, joules = after.at - before.at, after.joules - before.joules
    return {
        "joules_per_token": joules / max(1.0, after.tokens - before.tokens),
        "mean_power_w": joules / seconds,
        "held_percent": 100 * (after.held - before.held) / seconds,
    }


def measure(
    options: argparse.Namespace, cores: Cores, rate: float, target: float, folder: Path, meter: Gpu | None
) -> dict[str, float]:
    """Return the figures of one run of the load."""
    command = [sys.executable, "-m", "blink", "bench", "--port", str(options.port), "--request-rate", f"{rate:g}"]
    command += ["--duration", f"{options.duration:g}", "--num-warmups", "0", *options.bench_args]
    command += ["--extra-body", json.dumps({"tpot_target_ms": target}), "--result-dir", str(folder)]
    command += ["--result-filename", "run.json", "--save-result"]
    command += ["--client-cpus", cores.client] if cores.client else []
    with (folder / "bench.log").open("w") as log:
        load = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        energy = watch(load, options, meter)
        load.wait()
    said = (folder / "bench.log").read_text()
    if load.returncode:
        raise SystemExit(f"pacing.py: blink bench failed\n{said[-3000:]}")
    for line in said.splitlines():
        if "DOUBTFUL" in line:
            print(f"{rate:g} req/s, target {target:g}: {line.strip()}", flush=True)
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())["runs"][0]
    found = {name: math.nan if run.get(name) is None else float(run[name]) for name in FIGURES}
    if found["failed"]:
        print(f"{rate:g} req/s, target {target:g}: {found['failed']:g} requests failed: {run['errors']}", flush=True)
    return found | energy


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def report(found: dict[tuple[float, float], list[dict[str, float]]]) -> None:
    """Print the table, of medians."""
    print("".join(f"{head:>10}" for head in HEADS))
    for (rate, target), runs in found.items():
        figures = medians(runs)
        unpaced = found.get((rate, 0.0))
        ratio = figures["joules_per_token"] / medians(unpaced)["joules_per_token"] if unpaced else math.nan
        print(
            f"{rate:10g}{target:10g}{figures['joules_per_token']:10.4f}{ratio:10.3f}{figures['mean_power_w']:10.0f}"
            f"{figures['p50_ttft_ms']:10.2f}{figures['p99_ttft_ms']:10.1f}"
            f"{figures['p50_tpot_ms']:10.2f}{figures['p99_tpot_ms']:10.2f}{figures['p99_itl_ms']:10.2f}"
            f"{figures['held_percent']:10.1f}",
            flush=True,
        )


def open_meter(gpu: int) -> Gpu | None:
    """Return what reads the GPU's energy, or say why nothing does."""
    try:
        return Gpu(gpu)
    except BlinkError as error:
        print(f"no energy is read: {error}", flush=True)
        return None


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=LLAMA, help="folder with a config.json")
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 32], help="requests per second")
    parser.add_argument("--targets", type=float, nargs="+", default=[0, 10, 15, 20], help="milliseconds; 0: no pacing")
    parser.add_argument("--duration", type=float, default=16.0, help="seconds of arrivals of each run")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of them until energy counts")
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU, as nvidia-smi counts")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--serve-args", nargs="*", default=["--max-num-seqs=256"], help="more for blink serve")
    parser.add_argument("--bench-args", nargs="*", default=[], help="more for blink bench, each as --name=value")
    parser.add_argument("--output", type=Path, help="JSON file of all runs")
    return parser.parse_args()


def main() -> None:
    """Print a line for each rate and target."""
    options, cores = read_options(), split_cores()
    meter = open_meter(options.gpu)
    found: dict[tuple[float, float], list[dict[str, float]]] = {
        (rate, target): [] for rate in options.rates for target in options.targets
    }
    with tempfile.TemporaryDirectory() as name, serve(options, cores, Path(name) / "serve.log"):
        measure(options, cores, max(options.rates), 0, Path(name), meter)  # the clocks and the table of costs settle
        for _ in range(options.repeats):
            for (rate, target), runs in found.items():
                runs.append(measure(options, cores, rate, target, Path(name), meter))
    report(found)
    if options.output:
        rows = [{"rate": rate, "target_ms": target, "runs": runs} for (rate, target), runs in found.items()]
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
