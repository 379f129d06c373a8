# SPDX-License-Identifier: Apache-2.0
"""What an engine whose window blocks are freed must keep on every device: the tokens of a cold run that frees none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from blink.engine.cache_size import CacheShape, CacheSize
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder
from recurrent_prefixes import draw_tokens, generate, run, start

_CAPACITY = 400  # blocks: of all tests' prompts and answers together


def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines keep all tokens in all layers, as if none had a window."""
    monkeypatch.setattr(CacheShape, "complete", lambda _, num_blocks: CacheSize(num_blocks, 0))


def poison_window_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each window block hold NaN until something writes it."""
    allocate = Decoder.allocate_kv_cache

    def allocate_poisoned(decoder: Decoder, *sizes: int) -> KvCache:
        kv_cache = allocate(decoder, *sizes)
        for index, layer in enumerate(decoder.spec.layers):
            mixer = layer.mixer.attention
            if len(sizes) == 5 and sizes[4] and mixer and mixer.window and mixer.kv_source is None:
                kv_cache[index].cells.fill_(torch.nan)
        return kv_cache

    monkeypatch.setattr(Decoder, "allocate_kv_cache", allocate_poisoned)


def limit_windows(monkeypatch: pytest.MonkeyPatch, num_window_blocks: int) -> None:
    """Let engines have as many window blocks as one sequence takes, or more."""

    def complete(shape: CacheShape, num_blocks: int) -> CacheSize:
        return CacheSize(num_blocks, max(num_window_blocks, shape.most_window_blocks))

    monkeypatch.setattr(CacheShape, "complete", complete)


def run_cold(path: Path, device: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of prompts in an engine that frees nothing and finds nothing."""
    with pytest.MonkeyPatch.context() as patch:
        keep_all(patch)
        cold = run(path, device, prompts, max_tokens, enable_prefix_caching=False)
    assert not any(cached for _, cached in cold)
    return [tokens for tokens, _ in cold]


def check_hits_behind_freed_blocks(path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than the window are found in whole, in part, and no more, as window blocks are taken by others."""
    limit_windows(monkeypatch, 14)
    rng = random.Random(7)
    first, second = draw_tokens(rng, 150), draw_tokens(rng, 150)
    prompts = [first, first, first[:100], second, first, [*second[:90], *draw_tokens(rng, 30)], second, first]
    cold = run_cold(path, device, prompts, 6)
    poison_window_blocks(monkeypatch)
    warm = run(path, device, prompts, 6, num_gpu_blocks_override=_CAPACITY)
    assert [tokens for tokens, _ in warm] == cold
    cached = [found for _, found in warm]
    assert cached[:2] == [0, 144], "a prompt again is found up to its last block"
    assert any(found < 144 for found in cached[4:]), "no window block was taken by another prompt"
    assert any(cached[4:])


def check_many_at_once(path: Path, device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with shared prefixes run at once in so few window blocks that some are preempted; then again."""
    rng, max_tokens = random.Random(5), 40
    roots = [draw_tokens(rng, 100) for _ in range(3)]
    prompts = [rng.choice(roots)[: rng.randrange(1, 100)] + draw_tokens(rng, rng.randrange(1, 9)) for _ in range(count)]
    cold = run_cold(path, device, prompts, max_tokens)
    limit_windows(monkeypatch, 12)
    poison_window_blocks(monkeypatch)
    sizes: dict[str, Any] = {"max_model_len": 160, "num_gpu_blocks_override": 20}
    with start(path, device, **sizes) as llm:
        for _ in range(2):
            warm = generate(llm, prompts, max_tokens)
            assert [tokens for tokens, _ in warm] == cold
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["prefix_hits"] > 0
    assert stats["num_window_blocks"] == 12
