# SPDX-License-Identifier: Apache-2.0
"""A router that predicts from an engine's events how much of each prompt its prefix cache holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.engine.kv_event_wire import to_wire
from blink.region.kv_events import KvEventRing
from cache_index import CacheIndex

BLOCK = 16


class RouterEnd:
    """Stands for the publisher: takes events from the ring, and needs no ZeroMQ."""

    made: RouterEnd

    def __init__(self, ring: KvEventRing, *_: Any, **__: Any) -> None:
        self.ring, self.index = ring, CacheIndex()
        RouterEnd.made = self

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def follow(self) -> None:
        while events := self.ring.take(1000):
            self.index.apply(to_wire(events, BLOCK))

    def predict(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt the cache holds; one is always left to compute."""
        known = {block: own for own, block in self.index.blocks.items()}
        parent, found = None, 0
        while found + BLOCK < len(prompt):
            parent = known.get((parent, tuple(prompt[found : found + BLOCK])))
            if parent is None:
                break
            found += BLOCK
        return found


def check_predictions(
    model: Path, device: str, monkeypatch: pytest.MonkeyPatch, num_requests: int, **more: Any
) -> None:
    """See that each request finds what the events say, in a cache too small for all of them."""
    monkeypatch.setattr("blink.engine.kv_publisher.KvPublisher", RouterEnd)
    script = random.Random(5)
    starts = [[script.randrange(5, 100) for _ in range(70)] for _ in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 160, "skip_tokenizer_init": True}
    options |= more
    settings = {"enable_kv_cache_events": True}
    with LLM(str(model), device=device, dtype="float32", max_num_seqs=2, kv_events_config=settings, **options) as llm:
        router, hits = RouterEnd.made, 0
        for _ in range(num_requests):
            start = script.choice(starts)
            prompt = [
                *start[: script.randint(20, 70)],
                *(script.randrange(5, 100) for _ in range(script.randint(0, 20))),
            ]
            router.follow()
            predicted = router.predict(prompt)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.num_cached_tokens == predicted
            hits += predicted > 0
        assert hits > num_requests // 4 and llm.stats()["evicted_blocks"] > 0
        assert router.index.num_clears == 0
