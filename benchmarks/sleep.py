# SPDX-License-Identifier: Apache-2.0
"""Time sleep and wake-up of an engine on a GPU with random weights: seconds of each, and bytes that sleep frees.

The weights' bytes over the seconds of a wake-up are to be compared with the link's speed, which is measured before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from blink import LLM, SamplingParams


def measure(run: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure_link(num_bytes: int = 1 << 30) -> float:
    """Return the bytes per second of copies from locked memory to the GPU."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return num_bytes / min(measure(copy) for _ in range(5))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=16 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"link: {measure_link() / 1e9:.1f} GB/s", flush=True)
    llm = LLM(
        str(options.model), load_format="dummy", dtype="bfloat16", device="cuda", skip_tokenizer_init=True,
        enable_sleep_mode=True, kv_cache_memory_bytes=options.kv_cache_memory_bytes, max_model_len=2048,
    )  # fmt: skip
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
    with llm:
        wanted = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        times: list[tuple[float, float, float]] = []
        for _ in range(options.repeats):
            asleep = measure(lambda: llm.sleep(1))
            weights, cells = (measure(lambda tag=tag: llm.wake_up([tag])) for tag in ("weights", "kv_cache"))
            times.append((asleep, weights, cells))
            assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids == wanted
    for name, column in zip(("sleep", "wake: weights", "wake: KV cache"), zip(*times, strict=True), strict=True):
        print(f"{name:16} {statistics.median(column):6.3f} s (median of {len(times)}; the first {column[0]:.3f})")
    print(f"wake-up          {statistics.median(sum(one[1:]) for one in times):6.3f} s")


if __name__ == "__main__":
    main()
