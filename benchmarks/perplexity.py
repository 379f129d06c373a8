# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a model on a fixed text, as it is and with each --quantization, by the logprobs of a prompt.

The text, perplexity.txt, is in the public domain: Lincoln, Carroll, Austen, Jefferson.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from blink import LLM, SamplingParams

TEXT = Path(__file__).with_suffix(".txt")


def measure_perplexity(model: str = "", **options: str) -> float:
    """Return the perplexity of the text as one prompt; options: those of LLM."""
    with LLM(model=model, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scores = llm.generate([TEXT.read_text()], params, use_tqdm=False)[0].prompt_logprobs
    return math.exp(-sum(entry.logprob for entry in scores) / len(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    plain = measure_perplexity(options.model, device=options.device)
    print(f"{'auto':>6}{plain:>10.4f}")
    rounded = measure_perplexity(options.model, device=options.device, quantization="fp8")
    print(f"{'fp8':>6}{rounded:>10.4f}{rounded / plain - 1:>+9.2%}")


if __name__ == "__main__":
    main()
