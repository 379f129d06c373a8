# SPDX-License-Identifier: Apache-2.0
"""Time per output token of models that GPUs share: alone, with a stopped engine process, and beside busy processes.

Each model has random weights and an engine process of its own, which is not stopped on a CPU, where it computes.

python benchmarks/tensor_parallel.py MODEL ... --tensor-parallel-size 8 --quantization fp8
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path

from dummy_engine import make_config
from engine_client import connect
from gpu_decode import Window, make_model, make_parser, run_batch
from step_bytes import cache_bytes, weight_bytes

from blink.config import EngineConfig
from blink.engine.boot import create_engine
from blink.link.client import EngineClient
from blink.models.weights.source import read_spec

_SPIN = "while True: pass"


def serve(config: EngineConfig) -> None:
    """Run an engine until SIGTERM."""
    engine = create_engine(config)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    engine.run()


@contextmanager
def run_process(config: EngineConfig) -> Iterator[tuple[EngineClient, int]]:
    """Serve in a process of its own; yield a client and the process's id."""
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config,))
    process.start()
    assert process.pid is not None
    try:
        client = connect(config.region, is_alive=process.is_alive)
        yield client, process.pid
        client.close()
    finally:
        process.terminate()
        process.join(20)
        process.kill()


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """Keep a process stopped."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def list_states(process: int, options: argparse.Namespace) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return what the engine is measured in, by name."""
    states: dict[str, Callable[[], AbstractContextManager[None]]] = {"alone": nullcontext}
    if options.device != "cpu":
        states["engine process stopped"] = lambda: stopped(process)
    return states | {f"{options.busy} busy processes": lambda: busy(options.busy)}


def measure_model(options: argparse.Namespace) -> list[str]:
    """Return the table's lines of one model; print each when it is there."""
    model, lines, start = options.model.resolve().name, list[str](), time.monotonic()
    with run_process(make_engine_config(options)) as (client, process):
        print(f"{model}: ready after {time.monotonic() - start:.0f} s", flush=True)
        run_batch(client, 1, options)
        for rows in options.rows:
            alone = 0.0
            for state, enter in list_states(process, options).items():
                with enter():
                    window = measure(client, rows, options)
                alone = alone or window.tpot_ms
                times = f"{window.tpot_ms:10.3f}{find_limit(rows, window, options):10.3f}{window.tpot_ms / alone:9.4f}"
                lines.append(f"{model:24}{options.tensor_parallel_size:6}{rows:6}{times}  {state}")
                print(lines[-1], flush=True)
    return lines


def make_engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the configuration of the engine that the options describe."""
    sizes = {"num_blocks": options.num_blocks, "max_num_seqs": options.max_num_seqs}
    return make_config(make_model(options), device=options.device, ranks=options.tensor_parallel_size, **sizes)


def measure(client: EngineClient, rows: int, options: argparse.Namespace) -> Window:
    """Return the median of some runs."""
    windows = sorted((run_batch(client, rows, options) for _ in range(options.repeats)), key=attrgetter("tpot_ms"))
    return windows[len(windows) // 2]


def find_limit(rows: int, window: Window, options: argparse.Namespace) -> float:
    """Return how many milliseconds a rank takes to read its part of the weights and the KV cache."""
    spec, itemsize = read_spec(options.model), 2 if options.device == "cuda" else 4
    read = weight_bytes(spec, rows, itemsize, options.quantization)
    read += cache_bytes(spec, rows, window.context, itemsize if options.kv_cache_dtype == "auto" else 1)
    return read / options.tensor_parallel_size / options.bandwidth / 1e9


def main() -> None:
    parser = make_parser(__doc__, models="+")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=2, help="as the server's option")
    parser.add_argument("--busy", type=int, default=96, help="busy processes of the third state")
    parser.set_defaults(rows=[1, 8, 32], max_num_seqs=32, max_model_len=2048, num_blocks=4096)
    options = parser.parse_args()
    lines = [line for model in options.model for line in measure_model(replace_model(options, model))]
    print(f"\n{'model':24}{'ranks':>6}{'rows':>6}{'TPOT ms':>10}{'limit ms':>10}{'to alone':>9}", *lines, sep="\n")


def replace_model(options: argparse.Namespace, model: Path) -> argparse.Namespace:
    """Return the options for one of the models."""
    return argparse.Namespace(**vars(options) | {"model": model})


if __name__ == "__main__":
    main()
