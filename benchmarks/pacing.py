# SPDX-License-Identifier: Apache-2.0
"""Joules per token, and latency, by the target of time per output token: one server, one load, several targets.

A server of Llama-3-8B's shape with random weights gets `blink bench`'s load at each rate and each target, which the
requests carry. Target 0 is the server without pacing. Several repeats alternate the targets; the table has medians.
Joules are those of the GPU's energy counter (nvidia-ml-py) over a whole run; nothing else may use the GPU.

Run with: python benchmarks/pacing.py [--rates 8 32 48] [--targets 0 10 15 20] [--duration 12] [--repeats 3]
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

LLAMA = Path("src/blink/models/configs/llama-3-8b")
CLIENT_CORES = 4  # the last of the machine, where it has three times as many
START_SECONDS = 240
FIGURES = ("joules_per_token", "mean_power_w", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")
FIGURES += ("p99_itl_ms", "completed", "failed")
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


def held_seconds(port: int) -> float:
    """Return how long steps have waited, by the server's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("blink:held_seconds_total"))


def measure(options: argparse.Namespace, cores: Cores, rate: float, target: float, folder: Path) -> dict[str, float]:
    """Return the figures of one run of the load."""
    command = [sys.executable, "-m", "blink", "bench", "--port", str(options.port), "--request-rate", f"{rate:g}"]
    command += ["--duration", f"{options.duration:g}", "--num-warmups", "1", *options.bench_args]
    command += ["--extra-body", json.dumps({"tpot_target_ms": target}), "--result-dir", str(folder)]
    command += ["--result-filename", "run.json", "--save-result"]
    command += ["--client-cpus", cores.client] if cores.client else []
    before, begun = held_seconds(options.port), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pacing.py: blink bench failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    for line in (done.stdout + done.stderr).splitlines():
        if "DOUBTFUL" in line:
            print(f"{rate:g} req/s, target {target:g}: {line.strip()}", flush=True)
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())["runs"][0]
    found = {name: math.nan if run.get(name) is None else float(run[name]) for name in FIGURES}
    if found["failed"]:
        print(f"{rate:g} req/s, target {target:g}: {found['failed']:g} requests failed: {run['errors']}", flush=True)
    held = (held_seconds(options.port) - before) / (time.monotonic() - begun)
    return found | {"held_percent": 100 * held}


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


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=LLAMA, help="folder with a config.json")
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 32, 48], help="requests per second")
    parser.add_argument("--targets", type=float, nargs="+", default=[0, 10, 15, 20], help="milliseconds; 0: no pacing")
    parser.add_argument("--duration", type=float, default=12.0, help="seconds of arrivals of each run")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--serve-args", nargs="*", default=["--max-num-seqs=256"], help="more for blink serve")
    parser.add_argument("--bench-args", nargs="*", default=[], help="more for blink bench, each as --name=value")
    parser.add_argument("--output", type=Path, help="JSON file of all runs")
    return parser.parse_args()


def main() -> None:
    """Print a line for each rate and target."""
    options, cores = read_options(), split_cores()
    found: dict[tuple[float, float], list[dict[str, float]]] = {
        (rate, target): [] for rate in options.rates for target in options.targets
    }
    with tempfile.TemporaryDirectory() as name, serve(options, cores, Path(name) / "serve.log"):
        measure(options, cores, max(options.rates), 0, Path(name))  # the clocks and the table of costs settle
        for _ in range(options.repeats):
            for (rate, target), runs in found.items():
                runs.append(measure(options, cores, rate, target, Path(name)))
    report(found)
    if options.output:
        rows = [{"rate": rate, "target_ms": target, "runs": runs} for (rate, target), runs in found.items()]
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
