# SPDX-License-Identifier: Apache-2.0
"""Time per output token of the GPU engine and the scheduler's share of it, at several batch sizes, without HTTP.

The client drives a queue pair directly; token times are the engine's. Decoding alone is measured: all prompts are done
before, and beside each time stand the bytes that a step reads, and the power and the clock of the GPU if its driver
says: a GPU at its limit of power lowers its clock. With several ranks all these are of one. The scheduler's time from
the end of a step to the launch of the next is read from its trace ring.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from dummy_engine import run_engine
from gauge import Gauge
from step_bytes import cache_bytes, gguf_bytes, weight_bytes

from blink.config import ModelConfig
from blink.errors import BlinkError
from blink.link.client import EngineClient
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec
from blink.region.layout import CqeKind
from blink.region.memory import open_region
from blink.sampling_params import SamplingParams


@dataclass(frozen=True)
class Window:
    """The decode steps that are measured: all prompts are done before, no sequence ends in them."""

    start_ns: int  # the engine's clock
    end_ns: int
    tpot_ms: float
    context: float  # tokens of a sequence, on average over sequences and steps
    gauge: dict[str, float]  # what the GPU took meanwhile; empty if nothing says


def run_batch(client: EngineClient, rows: int, options: argparse.Namespace, gauge: Gauge | None = None) -> Window:
    """Generate `rows` sequences at once; measure from the first token of the last one, for `new_tokens` tokens."""
    assert client.info is not None
    chance = np.random.default_rng(rows)
    most = client.info.max_model_len - options.prompt_tokens
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)
    times: dict[int, list[int]] = {}
    for _ in range(rows):
        prompt = chance.integers(0, client.info.vocab_size, options.prompt_tokens).astype(np.int32)
        times[client.submit(prompt, params, seed=0)] = []
    open_sequences, next_tick, is_done = rows, 0.0, False
    watched: dict[str, float] | None = None
    watch = ExitStack()
    while open_sequences:
        if time.monotonic() > next_tick:
            next_tick = time.monotonic() + 0.25
            if lost := client.tick():
                raise SystemExit(lost)
        for completion in client.drain():
            if completion["kind"] == CqeKind.TOKEN:
                times[int(completion["sequence"])].append(int(completion["time_ns"]))
            open_sequences -= completion["finish_reason"] != 0
        least = min(map(len, times.values()))
        if watched is None and least > 0:
            watched = watch.enter_context(gauge.watch()) if gauge else {}
        if not is_done and least > options.new_tokens:
            is_done = True
            watch.close()
            for sequence in times:
                client.cancel(sequence)
    return cut_window(list(times.values()), options, watched or {})


def cut_window(times: list[list[int]], options: argparse.Namespace, gauge: dict[str, float]) -> Window:
    """Return the window of sequences' token times."""
    start = max(stamps[0] for stamps in times)
    end = min(times, key=len)[options.new_tokens]
    before = [sum(stamp < start for stamp in stamps) for stamps in times]
    inside = [sum(start <= stamp <= end for stamp in stamps) for stamps in times]
    context = options.prompt_tokens + statistics.mean(before) + statistics.mean(inside) / 2
    return Window(start, end, (end - start) / 1e6 / (statistics.median(inside) - 1), context, gauge)


def read_launches(region: str, rows: int, window: Window) -> dict[str, float]:
    """Time from the end of a step to the launch of the next, over the traced steps of a window.

    Also its share of the steps' time: that in which no kernel of the model runs, but for the launch's own way.
    """
    trace = np.sort(open_region(region).trace(), order="step")
    steady = (trace["launched_ns"] >= window.start_ns) & (trace["launched_ns"] <= window.end_ns)
    steady &= (trace["num_rows"] == rows) & (trace["num_tokens"] == trace["num_decode_rows"])
    launched, retired = (trace[name].astype(np.int64) for name in ("launched_ns", "retired_ns"))
    delays = (launched - retired)[steady] / 1e3
    followed = steady[1:] & steady[:-1] & (np.diff(trace["step"].astype(np.int64)) == 1)
    if not followed.any():
        return {"launch_p50_us": np.nan, "launch_p99_us": np.nan, "launch_share": np.nan}
    p50, p99 = np.percentile(delays, [50, 99])
    share = (launched - retired)[1:][followed].sum() / np.diff(launched)[followed].sum()
    return {"launch_p50_us": float(p50), "launch_p99_us": float(p99), "launch_share": float(share)}


def measure(
    client: EngineClient, region: str, spec: ModelSpec, rows: int, options: argparse.Namespace
) -> dict[str, float]:
    """Run a batch size several times; return the median run and what its steps must read."""
    gauge = find_gauge() if options.device == "cuda" else None
    windows = [run_batch(client, rows, options, gauge) for _ in range(options.repeats)]
    windows.sort(key=lambda run: run.tpot_ms)
    window = windows[len(windows) // 2]
    itemsize = 2 if options.device == "cuda" else 4  # bfloat16 and float32, the engines' defaults
    if options.model.is_file():
        weights = gguf_bytes(options.model, spec, rows, itemsize)
    else:
        weights = weight_bytes(spec, rows, itemsize, options.quantization)
    ranks = options.tensor_parallel_size  # each reads about its part
    weights /= ranks
    kv = cache_bytes(spec, rows, window.context, itemsize if options.kv_cache_dtype == "auto" else 1) / ranks
    return {
        "tpot_ms": window.tpot_ms,
        "context": window.context,
        "floor_ms": (weights + kv) / options.bandwidth / 1e9,
        "weight_gb": weights / 1e9,
        "kv_gb": kv / 1e9,
        "tb_per_s": (weights + kv) / 1e9 / window.tpot_ms,
        **read_launches(region, rows, window),
        "watts": math.nan,
        "sm_mhz": math.nan,
        **window.gauge,
    }


@functools.cache
def find_gauge() -> Gauge | None:
    """Return what reads the GPU's power; None where there is no NVML."""
    try:
        return Gauge()
    except BlinkError:
        return None


def make_parser(description: str | None, models: str | None = None) -> argparse.ArgumentParser:
    """Return the options of what measures decoding. models: how many, as argparse's nargs says; None: one."""
    parser = argparse.ArgumentParser(description=description)
    told = "directory with a config.json, or a .gguf file; weights are random"
    parser.add_argument("model", type=Path, nargs=models, help=told)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=185)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=200, help="tokens that are measured, after all prompts")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quantization", default="auto", choices=("auto", "fp8"), help="as the server's option")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="as the server's option")
    parser.add_argument("--num-blocks", type=int, default=0, help="KV cache blocks; 0: as many as there is memory for")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="as the engine's option: fewer boot faster")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=4.5, help="TB/s that reads reach (4.5: an H200's)")
    parser.add_argument("--output", type=Path)
    return parser


def make_model(options: argparse.Namespace) -> ModelConfig:
    """Return the model that the options name, with random weights."""
    return ModelConfig(
        model=str(options.model),
        load_format="dummy",
        max_model_len=options.max_model_len,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="as the server's option")
    parser.add_argument("--deterministic", action="store_true", help="as the server's option")
    options = parser.parse_args()
    spec, model = read_spec(options.model), make_model(options)
    sizes = {"num_blocks": options.num_blocks, "max_num_seqs": options.max_num_seqs}
    sizes["ranks"] = options.tensor_parallel_size
    with run_engine(model, device=options.device, deterministic=options.deterministic, **sizes) as (client, region):
        run_batch(client, 1, options)
        results = {rows: measure(client, region, spec, rows, options) for rows in options.rows}
    report(results, options)


def report(results: dict[int, dict[str, float]], options: argparse.Namespace) -> None:
    """Print the table."""
    share = f"of {options.bandwidth:g} %"
    heads = ("rows", "context", "TPOT ms", "floor ms", "weights GB", "KV GB", "TB/s", share)
    print("".join(f"{head:>11}" for head in heads) + "   end to launch us: p50      p99  share %       W    MHz")
    for rows, found in results.items():
        print(
            f"{rows:>11}{found['context']:>11.0f}{found['tpot_ms']:>11.3f}{found['floor_ms']:>11.3f}"
            f"{found['weight_gb']:>11.3f}{found['kv_gb']:>11.3f}{found['tb_per_s']:>11.3f}"
            f"{found['floor_ms'] / found['tpot_ms'] * 100:>11.1f}"
            f"{found['launch_p50_us']:>24.1f}{found['launch_p99_us']:>9.1f}{found['launch_share'] * 100:>9.2f}"
            f"{found['watts']:>8.0f}{found['sm_mhz']:>7.0f}"
        )
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
