# SPDX-License-Identifier: Apache-2.0
"""The CPU engine next to llama.cpp's server: the same file, client and cores, one server after the other.

A round starts llama.cpp, measures it and stops it, then does the same with Blink. Blink has its default flags.
llama.cpp gets a KV cache for as many tokens. Flags behind -- go to `blink serve`. See peer_servers.py for the servers
and peer_load.py for the load. The first run builds llama.cpp for this processor, which takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

from blink import __version__
from blink.models.weights.files import resolve_model
from peer_load import STREAMS, AnswerError, measure_prefill, run_streams
from peer_servers import Blink, LlamaCpp, Server, build_llama_cpp

SLOTS: Final = max(STREAMS)
LESS_IS_BETTER: Final = ("ITL", "memory", "ready", "install")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server gave in one round, by the name of the figure."""

    values: dict[str, float]


async def load(port: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure a server that is ready."""
    values: dict[str, float] = {}
    await run_streams(port, 1, options.prompt_tokens, 8)  # warms up
    for count in STREAMS:
        run = await run_streams(port, count, options.prompt_tokens, options.tokens)
        values[f"tokens/s, {name_streams(count)}"] = run.tokens_per_second
        values[f"ITL p99 ms, {name_streams(count)}"] = run.itl_p99_ms
    values[f"prefill tokens/s, {options.prefill_tokens:,} tokens"] = await measure_prefill(port, options.prefill_tokens)
    return values


def name_streams(count: int) -> str:
    """Name a number of streams."""
    return f"{count} stream{'s' if count > 1 else ''}"


def measure(server: Server, options: argparse.Namespace) -> Figures:
    """Start a server, measure it and stop it."""
    with server.run() as running:
        try:
            values = asyncio.run(load(running.port, options))
        except AnswerError as error:
            print(f"{type(server).__name__} is measured again: {error}", file=sys.stderr, flush=True)
            return measure(server, options)
        values["memory, MB"] = running.resident_bytes() / 1e6
    values["ready after, s"] = running.ready_seconds
    values["install, MB"] = server.installed_bytes() / 1e6
    return Figures(values)


def compare(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[list[str | float]]:
    """Return a row for each figure: the medians of both servers, their ratio, and the ratios of the rounds."""
    rows: list[list[str | float]] = []
    for name in ours[0].values:
        mine, other = ([figures.values[name] for figures in each] for each in (ours, theirs))
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        medians = statistics.median(mine), statistics.median(other)
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        rows.append([name, *(round(value, 2) for value in (*medians, statistics.median(ratios))), spread])
    return rows


def write_result(rows: list[list[str | float]], options: argparse.Namespace, server: LlamaCpp) -> str:
    """Return the JSON of a result as benchmarks/results keeps it."""
    settings = [
        f"{options.model.name}; Blink's flags: {' '.join(options.flags) or 'none'}; llama.cpp: {server.settings()}",
        f"streams: prompts of {options.prompt_tokens} tokens, {options.tokens} tokens each, two requests each",
        "memory: proportional set size of all processes, after the load; install: Blink with all that it needs but "
        "Python, llama.cpp's program and libraries",
    ]
    result = {
        "title": "The CPU engine and llama.cpp's server in turns",
        "date": date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {read_processor()}",
        "versions": {"Blink": __version__, "llama.cpp": server.version, "Python": platform.python_version()},
        "settings": settings,
        "commands": [f"python benchmarks/cpu_peers.py {' '.join(sys.argv[1:])}".strip()],
        "runs": f"medians of {options.rounds} rounds; the ratio is the median of the rounds' ratios",
        "raw_data": "not kept",
        "tables": [
            {
                "title": "Blink and llama.cpp",
                "notes": "More is better, but of ITL, memory, time until ready and install.",
                "columns": ["what", "Blink", "llama.cpp", "ratio", "ratios of the rounds"],
                "rows": rows,
            }
        ],
    }
    return json.dumps(result, indent=2) + "\n"


def read_processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "one processor")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="GGUF file; without it, the default model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a stream's request")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of a stream's request")
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    folder = Path.home() / ".cache" / "blink" / "peers"
    parser.add_argument("--peers", type=Path, default=folder, help="where llama.cpp is built (default: %(default)s)")
    parser.add_argument("--llama-server", type=Path, help="a llama-server that is built already")
    parser.add_argument("--output", type=Path, help="write a result as benchmarks/results keeps it")
    words = sys.argv[1:]
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser.parse_args(own, argparse.Namespace(flags=flags))
    options.model = resolve_model(options.model)
    blink = Blink(options.model, SLOTS, options.flags)
    peer = LlamaCpp(options.model, SLOTS, options.llama_server or build_llama_cpp(options.peers))
    peer.kv_tokens = blink.count_kv_tokens()
    ours: list[Figures] = []
    theirs: list[Figures] = []
    turns: list[tuple[Server, Callable[[Figures], None]]] = [(peer, theirs.append), (blink, ours.append)]
    for index in range(options.rounds):
        for server, keep in turns:
            figures = measure(server, options)
            keep(figures)
            shown = "  ".join(f"{name}: {value:.1f}" for name, value in figures.values.items())
            print(f"round {index + 1}, {type(server).__name__}: {shown}", file=sys.stderr, flush=True)
    rows = compare(ours, theirs)
    for name, mine, other, ratio, spread in rows:
        print(f"{name:32} {mine:10} {other:10} {ratio:6} ({spread})")
    if options.output:
        options.output.write_text(write_result(rows, options, peer))


if __name__ == "__main__":
    main()
