# SPDX-License-Identifier: Apache-2.0
"""Prompts whose beginnings come again after others, for caches that are too small for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from blink import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_batches(count: int) -> list[list[list[int]]]:
    """Return prompts in turns: beginnings that come again after others, and ends of their own."""
    script = random.Random(3)
    starts = [[script.randrange(5, 100) for _ in range(160)] for _ in range(6)]
    ends = ([script.randrange(5, 100) for _ in range(10)] for _ in range(1000))
    return [[[*start, *next(ends)] for start in script.sample(starts, 3)] for _ in range(count)]


def answer(llm: LLM, count: int = 20) -> Iterator[list[int]]:
    """Yield the answers to so many turns of prompts."""
    for batch in make_batches(count):
        for output in llm.generate(batch, GREEDY, use_tqdm=False):
            yield list(output.outputs[0].token_ids)
