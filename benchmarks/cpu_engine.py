# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the CPU engine at 1 and 8 concurrent sequences, beside transformers' generate.

Each is measured in a process of its own: OpenMP settings and thread pools belong to the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = list(range(1000, 1032))


def median_rate(num_tokens: int, run: Callable[[], object], repeats: int) -> float:
    """Return tokens per second, the median over several runs after one to warm up."""
    run()
    rates: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        rates.append(num_tokens / (time.perf_counter() - start))
    return statistics.median(rates)


def measure_blink(concurrency: int, new_tokens: int, repeats: int) -> float:
    from blink import LLM, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    # No sharing: every sequence computes its own prompt, as in the other program.
    with LLM(enable_prefix_caching=False) as llm:
        prompts = [PROMPT] * concurrency
        return median_rate(concurrency * new_tokens, lambda: llm.generate(prompts, greedy, use_tqdm=False), repeats)


def measure_transformers(concurrency: int, new_tokens: int, repeats: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    from blink.models.weights.files import resolve_model

    path = resolve_model("")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor([PROMPT] * concurrency)
    mask = torch.ones_like(ids)

    def run() -> object:
        limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, do_sample=False, **limits)

    return median_rate(concurrency * new_tokens, run, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    results: dict[str, float] = {}
    spawn = multiprocessing.get_context("spawn")
    for concurrency in (1, 8):
        for name, measure in (("transformers", measure_transformers), ("blink", measure_blink)):
            with spawn.Pool(1) as process:
                arguments = (concurrency, options.new_tokens, options.repeats)
                results[f"{name}_{concurrency}"] = process.apply(measure, arguments)
    print(f"{'concurrent':>10} {'transformers':>14} {'blink':>10}   tokens/s, {len(os.sched_getaffinity(0))} cores")
    for concurrency in (1, 8):
        reference, blink = (results[f"{name}_{concurrency}"] for name in ("transformers", "blink"))
        print(f"{concurrency:>10} {reference:>14.1f} {blink:>10.1f}")
    print(f"blink at 8 / blink at 1: {results['blink_8'] / results['blink_1']:.2f}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
