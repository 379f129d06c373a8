# SPDX-License-Identifier: Apache-2.0
"""Perplexity of models on fixed texts, as they are and rounded by Blink's flags, by the logprobs of prompts.

perplexity.txt is four famous passages (Lincoln, Carroll, Austen, Jefferson), much of which models know by heart;
perplexity-prose.txt is a chapter of Austen's Emma: both are in the public domain. The third text is the project's
licence. A text is cut into windows of 2,047 tokens, so models of one tokenizer are asked the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blink import LLM, SamplingParams
from blink.config import FrontendConfig, ModelConfig
from blink.text.assets import load_assets

TEXT = Path(__file__).with_suffix(".txt")
PROSE = TEXT.with_name("perplexity-prose.txt")
LICENCE = Path(__file__).parents[1] / "LICENSE"
_WINDOW = 2048


def score_prompts(prompts: Sequence[str | Sequence[int]], **options: Any) -> list[float]:
    """Return the logprobs of the prompts' tokens but the first of each; options: those of LLM."""
    with LLM(**options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
    positions = (position for output in outputs for position in output.prompt_logprobs or () if position is not None)
    return [next(iter(position.values())).logprob for position in positions]


def find_perplexity(logprobs: Sequence[float]) -> float:
    """Return the perplexity of tokens with these logprobs."""
    return math.exp(-sum(logprobs) / len(logprobs))


def cut(text: str, model: str) -> list[list[int]]:
    """Return a text's token ids in windows that a model takes."""
    tokenizer = load_assets(FrontendConfig(model=ModelConfig(model=model))).tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=True)
    return [tokens[start : start + _WINDOW - 1] for start in range(0, len(tokens), _WINDOW - 1)]


def measure_perplexity(model: str = "", text: Path = TEXT, **options: str) -> float:
    """Return the perplexity of a text; options: those of LLM."""
    return find_perplexity(score_prompts(cut(text.read_text(), model), model=model, **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[""], metavar="MODEL", help="the first is what others are held to")
    parser.add_argument("--texts", nargs="+", type=Path, default=[TEXT, PROSE, LICENCE])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows = [(model or "default", {"model": model}) for model in options.models]
    flags = ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8"})
    rows[1:1] = [(f"{rows[0][0]}, {name} fp8", {**rows[0][1], **flag}) for flag in flags for name in flag]
    width = max(len(name) for name, _ in rows)
    print(f"{'':{width}}" + "".join(f"{text.name:>22}" for text in options.texts))
    plain: dict[Path, float] = {}
    for name, given in rows:
        line = f"{name:{width}}"
        for text in options.texts:
            found = measure_perplexity(text=text, device=options.device, **given)
            line += f"{found:>12.4f}{found / plain.setdefault(text, found) - 1:>+10.2%}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
