# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a model on a fixed text, as it is, with each --quantization and with the KV cache in FP8.

It comes from the logprobs of a prompt.

The text, perplexity.txt, is in the public domain: Lincoln, Carroll, Austen, Jefferson.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blink import LLM, SamplingParams

TEXT = Path(__file__).with_suffix(".txt")


def score_prompt(prompt: str | Sequence[int], **options: Any) -> list[float]:
    """Return the logprobs of a prompt's tokens but the first; options: those of LLM."""
    with LLM(**options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    return [entry.logprob for entry in output.prompt_logprobs]


def find_perplexity(logprobs: Sequence[float]) -> float:
    """Return the perplexity of tokens with these logprobs."""
    return math.exp(-sum(logprobs) / len(logprobs))


def measure_perplexity(model: str = "", **options: str) -> float:
    """Return the perplexity of the text as one prompt; options: those of LLM."""
    return find_perplexity(score_prompt(TEXT.read_text(), model=model, **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    plain = measure_perplexity(options.model, device=options.device)
    print(f"{'auto':>20}{plain:>10.4f}")
    for name in ("quantization", "kv_cache_dtype"):
        rounded = measure_perplexity(options.model, device=options.device, **{name: "fp8"})
        print(f"{name + ' fp8':>20}{rounded:>10.4f}{rounded / plain - 1:>+9.2%}")


if __name__ == "__main__":
    main()
