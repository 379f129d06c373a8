# SPDX-License-Identifier: Apache-2.0
"""Tokens per step and TPOT with and without speculation, by kind of text and number of rows.

Two servers of the same model answer the chats that `blink bench` ships with, one after the other: without drafts, then
with them. All chats of a run are sent at once. A step is counted for each sequence that it gives tokens to. Flags
behind -- go to `blink serve`.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from blink.bench.chats import CHAT_KINDS
from blink.bench.config import BenchConfig, LoadConfig, ServerConfig
from blink.bench.measurement import measure
from blink.bench.summary import summarise
from blink.bench.target import Target
from blink.bench.workload import Workload

BOOT_SECONDS = 1800
STOP_SECONDS = 60
_COUNTER = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """What the chats of one kind gave at once; the median of some runs."""

    kind: str
    rows: int
    drafts: bool
    output_tokens: int
    tpot_ms: float
    tokens_per_second: float
    tokens_per_step: float
    accepted_share: float  # of draft tokens; 0 if there was none


@contextmanager
def serve(options: argparse.Namespace, *, drafts: bool) -> Iterator[str]:
    """Run a server, with speculation or without; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "blink",
        "serve",
        *([options.model] if options.model else ()),
        f"--port={port}",
        "--max-client-share=1",
    ]
    command += [f"--max-num-seqs={max(options.rows)}", "--no-enable-prefix-caching", *options.flags]
    command += [f"--speculative-config={options.speculative_config}"] if drafts else []
    process = subprocess.Popen(command)
    try:
        wait_until_ready(process, url := f"http://127.0.0.1:{port}")
        yield url
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server does not become ready")


def count_drafts(page: str) -> dict[str, int]:
    """Return from a page of metrics how many tokens were drafted and accepted."""
    return {name: int(float(value)) for name, value in _COUNTER.findall(page)}


def tokens_per_step(output_tokens: int, answers: int, accepted: int) -> float:
    """Return the tokens of a step of decoding, for each of its sequences: prompts give the first one."""
    decoded = output_tokens - answers
    return decoded / (decoded - accepted) if decoded > accepted else float(decoded > 0)


def run_once(target: Target, url: str, options: argparse.Namespace, kind: str, rows: int) -> dict[str, float]:
    """Send chats of a kind at once; return what they took."""
    load = LoadConfig(
        request_rate="inf",
        num_prompts=rows,
        dataset_name=kind,
        temperature=options.temperature,
        output_len=options.tokens,
    )
    requests = Workload(BenchConfig(load=load), target).plan(0, 0)
    before = count_drafts(httpx.get(f"{url}/metrics", trust_env=False).text)
    found = summarise(measure(target.resolved(), requests), ())
    after = count_drafts(httpx.get(f"{url}/metrics", trust_env=False).text)
    if found["completed"] < rows:
        raise SystemExit(f"{rows - found['completed']} of {rows} answers failed: {found['errors']}")
    drafted, accepted = (after[name] - before[name] for name in ("draft", "accepted"))
    return {
        "output_tokens": found["total_output_tokens"],
        "tpot_ms": found["mean_tpot_ms"] or float("nan"),
        "tokens_per_second": found["output_throughput"],
        "tokens_per_step": tokens_per_step(found["total_output_tokens"], rows, accepted),
        "accepted_share": accepted / drafted if drafted else 0.0,
    }


def measure_server(url: str, options: argparse.Namespace, *, drafts: bool) -> list[Run]:
    """Measure all kinds and numbers of rows of one server."""
    target = Target(ServerConfig(base_url=url))
    runs: list[Run] = []
    for kind in options.kinds:
        for rows in options.rows:
            run_once(target, url, options, kind, rows)  # clocks and caches are warm
            found = [run_once(target, url, options, kind, rows) for _ in range(options.repeats)]
            found.sort(key=lambda one: one["tpot_ms"])
            median = found[len(found) // 2]
            runs.append(Run(kind, rows, drafts, int(median.pop("output_tokens")), **median))
    return runs


def show(plain: Sequence[Run], drafting: Sequence[Run]) -> str:
    """Return the table: each kind and number of rows without drafts and with them."""
    lines = [f"{'kind':>8} {'rows':>5} {'tokens/step':>12} {'accepted':>9} {'TPOT ms':>9} {'with':>9} {'ratio':>6}"]
    for before, after in zip(plain, drafting, strict=True):
        ratio = after.tpot_ms / before.tpot_ms
        lines.append(
            f"{after.kind:>8} {after.rows:>5} {after.tokens_per_step:>12.2f} {after.accepted_share:>9.0%} "
            f"{before.tpot_ms:>9.2f} {after.tpot_ms:>9.2f} {ratio:>6.2f}"
        )
    mean = statistics.geometric_mean(
        after.tpot_ms / before.tpot_ms for before, after in zip(plain, drafting, strict=True)
    )
    return "\n".join([*lines, f"geometric mean of the ratios: {mean:.2f}"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flags", nargs="*", help="behind --: flags of both servers")
    parser.add_argument("--model", default="", help="empty: the default one")
    parser.add_argument("--kinds", nargs="+", choices=CHAT_KINDS, default=list(CHAT_KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="chats at once")
    parser.add_argument("--tokens", type=int, default=0, help="most tokens of an answer; 0: as the chats have it")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the median is shown")
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 7}')
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    runs: list[list[Run]] = []
    for drafts in (False, True):
        with serve(options, drafts=drafts) as url:
            runs.append(measure_server(url, options, drafts=drafts))
    print(show(*runs))
    if options.output:
        options.output.write_text(json.dumps([asdict(run) for both in runs for run in both], indent=1))


if __name__ == "__main__":
    main()
