# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of long prefixes that host memory has kept, and what other sequences notice of the copies.

The prefixes together are larger than the KV cache. Each comes three times: it is computed, restored from host memory,
and found in the KV cache. Then some sequences decode while such requests arrive: of prefixes in the KV cache, and of
prefixes that have to be restored. Times are the engine's; random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from dummy_engine import make_config
from engine_client import time_first_token
from numpy.typing import NDArray
from tensor_parallel import run_process

from blink.config import EngineConfig, ModelConfig
from blink.kv_offload import OffloadConfig
from blink.link.client import EngineClient
from blink.region.block_hashes import hash_blocks, hash_root
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams

Prompt = NDArray[np.int32]
_ONE = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
_OWN = 16  # tokens of a prompt behind its prefix


@dataclass
class Prompts:
    """Prompts that begin with one of some prefixes."""

    prefixes: list[Prompt]
    chance: np.random.Generator
    vocab_size: int

    def make(self, number: int) -> Prompt:
        """Return a new prompt with a prefix."""
        own = self.chance.integers(0, self.vocab_size, _OWN).astype(np.int32)
        return np.concatenate([self.prefixes[number % len(self.prefixes)], own])


def make_engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return an engine whose KV cache goes on in host memory."""
    length = options.prefix_tokens + 4096
    positions = json.dumps({"max_position_embeddings": length})
    name = str(options.model)
    model = ModelConfig(model=name, load_format="dummy", max_model_len=length, hf_overrides=positions)
    config = make_config(model, device=options.device, num_blocks=options.num_blocks, max_num_seqs=32)
    offload = OffloadConfig(kv_offloading_size=options.host_gib)
    return replace(config, enable_prefix_caching=True, kv_offload=offload)


def submit(client: EngineClient, prompt: Prompt) -> int:
    """Submit a prompt whose prefix may be found, for one token; return the sequence's id."""
    assert client.info is not None
    key = client.info.hash_key
    hashes = hash_blocks(prompt, client.info.block_size, key, hash_root(key))
    return client.submit(prompt, _ONE, seed=0, block_hashes=hashes)


def first_token(client: EngineClient, prompt: Prompt) -> float:
    """Return the milliseconds from submission to the only token."""
    return time_first_token(client, lambda: submit(client, prompt))


def time_prefixes(client: EngineClient, prompts: Prompts) -> dict[str, list[float]]:
    """Return the times of prefixes that are computed, restored, and in the KV cache."""
    count = len(prompts.prefixes)
    times: dict[str, list[float]] = {"computed": [], "restored": [], "in the KV cache": []}
    times["computed"] = [first_token(client, prompts.make(number)) for number in range(count)]
    before = client.stats()["host_hits"]
    for number in range(count):
        times["restored"].append(first_token(client, prompts.make(number)))
        times["in the KV cache"].append(first_token(client, prompts.make(number)))
    restored = client.stats()["host_hits"] - before
    print(f"{restored / count:.0f} tokens of each prefix were restored", flush=True)
    return times


def decode_beside(
    client: EngineClient, rows: int, seconds: float, arrivals: Iterator[Prompt]
) -> tuple[NDArray[np.float64], list[float]]:
    """Return the gaps between tokens of so many sequences while a request arrives each 0.2 s, and its times; in ms.

    A request's time is from its submission to its token, on this process's clock.
    """
    endless = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)
    starts = [np.full(64, 100 + row, np.int32) for row in range(rows)]
    times: dict[int, list[int]] = {client.submit(start, endless, seed=row): [] for row, start in enumerate(starts)}
    waiting: dict[int, float] = {}
    first_tokens: list[float] = []
    begin = time.monotonic()
    next_arrival = begin + 0.5
    while time.monotonic() < begin + seconds:
        client.tick()
        if time.monotonic() > next_arrival:
            next_arrival += 0.2
            if (prompt := next(arrivals, None)) is not None:
                waiting[submit(client, prompt)] = time.monotonic()
        for one in client.drain():
            if one["kind"] != CqeKind.TOKEN:
                continue
            sequence = int(one["sequence"])
            if sequence in times:
                times[sequence].append(int(one["time_ns"]))
            elif sequence in waiting:
                first_tokens.append((time.monotonic() - waiting.pop(sequence)) * 1e3)
    for sequence in times:
        client.cancel(sequence)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        client.tick()
        client.drain()
    return np.concatenate([np.diff(own[20:]) for own in times.values()]) / 1e6, first_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = Path(__file__).parents[1] / "src/blink/models/configs/llama-3-8b"
    parser.add_argument("model", nargs="?", type=Path, default=shape, help="directory with a config.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prefix-tokens", type=int, default=8192)
    parser.add_argument("--prefixes", type=int, default=6)
    parser.add_argument("--num-blocks", type=int, default=2048, help="of the KV cache, fewer than the prefixes take")
    parser.add_argument("--host-gib", type=float, default=12)
    parser.add_argument("--rows", type=int, default=8, help="sequences that decode beside restorations")
    parser.add_argument("--seconds", type=float, default=8, help="of each of the three runs with them")
    options = parser.parse_args()
    with run_process(make_engine_config(options)) as (client, _):
        report(client, options)


def report(client: EngineClient, options: argparse.Namespace) -> None:
    """Measure, and print both tables."""
    assert client.info is not None
    chance = np.random.default_rng(0)
    size = options.prefixes, options.prefix_tokens
    prefixes = [*chance.integers(0, client.info.vocab_size, size).astype(np.int32)]
    prompts = Prompts(prefixes, chance, client.info.vocab_size)
    first_token(client, chance.integers(0, client.info.vocab_size, options.prefix_tokens).astype(np.int32))
    times = {name: statistics.median(each) for name, each in time_prefixes(client, prompts).items()}
    print(f"{'prefix':18}{'TTFT ms':>9}{'to computed':>13}")
    for name, milliseconds in times.items():
        print(f"{name:18}{milliseconds:9.2f}{milliseconds / times['computed']:13.3f}")
    kinds: dict[str, Callable[[], Iterator[Prompt]]] = {
        "nothing arrives": lambda: iter(()),
        "in the KV cache": lambda: (prompts.make(0) for _ in itertools.count()),
        "restored": lambda: map(prompts.make, itertools.count()),
    }
    print(f"{'arrivals':18}{'gap p50 ms':>12}{'p99 ms':>9}{'p99.9 ms':>10}{'TTFT p50 ms':>13}{'tokens restored':>17}")
    for name, arrivals in kinds.items():
        before = client.stats()["host_hits"]
        gaps, first_tokens = decode_beside(client, options.rows, options.seconds, arrivals())
        p50, p99, p999 = np.percentile(gaps, [50, 99, 99.9])
        ttft = statistics.median(first_tokens) if first_tokens else math.nan
        hits = client.stats()["host_hits"] - before
        print(f"{name:18}{p50:12.3f}{p99:9.3f}{p999:10.3f}{ttft:13.2f}{hits:17}", flush=True)


if __name__ == "__main__":
    main()
