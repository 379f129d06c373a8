# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the CPU engine at 1 and 8 concurrent sequences, beside transformers' generate."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from blink import LLM, SamplingParams
from blink.model_files import resolve_model

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
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    # No sharing: every sequence computes its own prompt, as in the other program.
    with LLM(enable_prefix_caching=False) as llm:
        prompts = [PROMPT] * concurrency
        return median_rate(concurrency * new_tokens, lambda: llm.generate(prompts, greedy, use_tqdm=False), repeats)


@torch.inference_mode()
def measure_transformers(concurrency: int, new_tokens: int, repeats: int) -> float:
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
    for concurrency in (1, 8):
        for name, measure in (("transformers", measure_transformers), ("blink", measure_blink)):
            results[f"{name}_{concurrency}"] = measure(concurrency, options.new_tokens, options.repeats)
    print(f"{'concurrent':>10} {'transformers':>14} {'blink':>10}   tokens/s, {torch.get_num_threads()} threads")
    for concurrency in (1, 8):
        reference, blink = (results[f"{name}_{concurrency}"] for name in ("transformers", "blink"))
        print(f"{concurrency:>10} {reference:>14.1f} {blink:>10.1f}")
    print(f"blink at 8 / blink at 1: {results['blink_8'] / results['blink_1']:.2f}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
