# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the CPU engine beside transformers' generate: 1 and 8 sequences, a prompt of 1,024 tokens.

The engine has its weights as the file has them, and dequantised, in turn. Each measurement is a process of its own:
OpenMP settings and thread pools belong to the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PROMPT = list(range(1000, 1032))
PROMPT_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are generated from together, and the tokens by which the time is divided."""

    prompts: list[list[int]]
    new_tokens: int
    num_tokens: int


def median_rate(num_tokens: int, run: Callable[[], object], repeats: int) -> float:
    """Return tokens per second, the median over several runs after one to warm up."""
    run()
    rates: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        rates.append(num_tokens / (time.perf_counter() - start))
    return statistics.median(rates)


def measure_blink(workload: Workload, repeats: int, dtype: str) -> float:
    from blink import LLM, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True)
    # No sharing: every sequence computes its own prompt, as in the other program.
    with LLM(enable_prefix_caching=False, dtype=dtype) as llm:
        return median_rate(workload.num_tokens, lambda: llm.generate(workload.prompts, greedy, use_tqdm=False), repeats)


def measure_transformers(workload: Workload, repeats: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    from blink.models.weights.files import resolve_model

    path = resolve_model("")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor(workload.prompts)
    mask = torch.ones_like(ids)

    def run() -> object:
        limits = {"max_new_tokens": workload.new_tokens, "min_new_tokens": workload.new_tokens, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, do_sample=False, **limits)

    return median_rate(workload.num_tokens, run, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind, in turn")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    prompt = PROMPT * (PROMPT_LENGTH // len(PROMPT))
    workloads = {
        "decode 1": Workload([PROMPT], options.new_tokens, options.new_tokens),
        "decode 8": Workload([PROMPT] * 8, options.new_tokens, 8 * options.new_tokens),
        f"prompt {PROMPT_LENGTH}": Workload([prompt], 1, PROMPT_LENGTH),
    }
    engines: dict[str, Callable[..., float]] = {
        "transformers": measure_transformers,
        "float32": partial(measure_blink, dtype="float32"),
        "quantised": partial(measure_blink, dtype="auto"),
    }
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, list[float]]] = {}
    print(f"tokens/s, {len(os.sched_getaffinity(0))} cores; median (least, most) of {options.rounds} processes")
    for title, workload in workloads.items():
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, measure in engines.items():
                with spawn.Pool(1) as process:
                    rates[name].append(process.apply(measure, (workload, options.repeats)))
        results[title] = rates
        texts = (f"{name} {statistics.median(v):.1f} ({min(v):.1f}, {max(v):.1f})" for name, v in rates.items())
        print(f"{title:>12}: {'  '.join(texts)}", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
