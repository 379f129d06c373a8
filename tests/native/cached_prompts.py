# SPDX-License-Identifier: Apache-2.0
"""Prompts whose prefixes a cache may hold, and others that take all of it."""

from __future__ import annotations

from collections.abc import Callable

from blink.link.queue_pair import QueuePair
from blink.sampling_params import SamplingParams
from harness import Harness, Inbox, expected_tokens, run_until_finished, submission

VOCAB = 97


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Return a prompt; those of other starts share no block."""
    return [(start + 5 * i) % VOCAB for i in range(length)]


def complete(h: Harness, pair: QueuePair, prompt: list[int], hashes: bytes | None = None) -> int:
    """Run a prompt to its end, check its tokens and return how many of the prompt's were found in a cache."""
    inbox = Inbox()
    entry = submission(prompt, (), h.hashes(prompt) if hashes is None else hashes)
    sequence = pair.submit(entry, SamplingParams(max_tokens=3))
    run_until_finished(h, inbox, [pair], [sequence])
    assert inbox.tokens(sequence) == expected_tokens(prompt, 3, VOCAB)
    cached = inbox.cached(sequence)
    assert cached is not None
    return cached


def check_restored(h: Harness, settle: Callable[[], None] = lambda: None) -> None:
    """Check that a prompt is restored which a KV cache of 128 tokens has evicted; settle: run before that."""
    pair = h.frontend()
    complete(h, pair, prompt_of(60))
    settle()
    fill(h, pair)
    computed = h.statistic("computed_tokens")
    assert complete(h, pair, prompt_of(60)) == 56
    assert h.statistic("host_hits") == 56
    assert h.statistic("computed_tokens") - computed == 4 + 2, "only what no cache held is computed"


def fill(h: Harness, pair: QueuePair) -> None:
    """Let other prompts take all of a KV cache of 128 tokens."""
    for start in range(40, 44):
        complete(h, pair, prompt_of(60, start))
