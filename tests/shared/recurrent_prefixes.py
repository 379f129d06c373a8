# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache of a recurrent model must keep on every device: the tokens of a cold run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM, SamplingParams
from blink.kernels.layer_cache import KvCache
from blink.models.decoder import Decoder

BLOCK = 16
_LONGEST = 75
_SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 200}
_SIZES |= {"dtype": "float32", "skip_tokenizer_init": True, "block_size": BLOCK}

Run = list[tuple[list[int], int]]  # of each prompt: the tokens, and the number of cached ones


def poison_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each slot of recurrent states hold NaN until something writes it: those of sequences and of snapshots."""
    allocate = Decoder.allocate_kv_cache

    def allocate_poisoned(decoder: Decoder, *sizes: int) -> KvCache:
        kv_cache = allocate(decoder, *sizes)
        for kept in kv_cache.recurrent.values():
            kept.states.fill_(torch.nan)
            kept.inputs.fill_(torch.nan)
            kept.gates.fill_(torch.nan)
        return kv_cache

    monkeypatch.setattr(Decoder, "allocate_kv_cache", allocate_poisoned)


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    """Return some tokens of a small model."""
    return [rng.randrange(3, 128) for _ in range(count)]


def start(path: Path, device: str, **options: Any) -> LLM:
    """Return an engine of small steps."""
    return LLM(model=str(path), device=device, **(_SIZES | options))


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Run:
    """Continue prompts greedily, all at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.num_cached_tokens or 0) for output in outputs]


def run(path: Path, device: str, prompts: list[list[int]], max_tokens: int = 4, **options: Any) -> Run:
    """Continue prompts greedily, one after the other, in an engine of their own."""
    with start(path, device, **options) as llm:
        return [generate(llm, [prompt], max_tokens)[0] for prompt in prompts]


def run_cold(path: Path, device: str, prompts: list[list[int]], max_tokens: int = 4) -> list[list[int]]:
    """Return the tokens of prompts without a prefix cache."""
    cold = run(path, device, prompts, max_tokens, enable_prefix_caching=False)
    assert not any(cached for _, cached in cold)
    return [tokens for tokens, _ in cold]


def check_prompts_around_a_snapshot(path: Path, device: str) -> None:
    """The first prompt leaves a snapshot at 64 tokens; others end 1 before, there, and 1 to 10 behind it."""
    prompt = draw_tokens(random.Random(3), _LONGEST)
    prompts = [prompt, *(prompt[:end] for end in (63, 64, *range(65, _LONGEST)))]
    warm = run(path, device, prompts)
    assert [tokens for tokens, _ in warm] == run_cold(path, device, prompts)
    assert [cached for _, cached in warm] == [0, 0, 48, *[64] * 10]


def check_a_shared_prefix(path: Path, device: str) -> None:
    """A prefix that was found without a snapshot gets one."""
    rng = random.Random(4)
    shared = draw_tokens(rng, 40)
    prompts = [[*shared, *[rng.randrange(3, 128)] * 20] for _ in range(3)]
    warm = run(path, device, prompts)
    assert [tokens for tokens, _ in warm] == run_cold(path, device, prompts)
    assert [cached for _, cached in warm] == [0, 0, 32]


def check_many_at_once(path: Path, device: str, count: int) -> None:
    """Prompts that share prefixes of all lengths run at once, in so few blocks that some are preempted; then again."""
    rng, max_tokens = random.Random(5), 24
    roots = [draw_tokens(rng, 100) for _ in range(3)]
    prompts = [rng.choice(roots)[: rng.randrange(1, 100)] + draw_tokens(rng, rng.randrange(1, 9)) for _ in range(count)]
    cold = run_cold(path, device, prompts, max_tokens)
    sizes = {"max_model_len": 144, "num_gpu_blocks_override": 14}
    with start(path, device, **sizes) as llm:
        for _ in range(2):
            warm = generate(llm, prompts, max_tokens)
            assert [tokens for tokens, _ in warm] == cold
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["prefix_hits"] > 0


def lengthen(path: Path, max_model_len: int) -> None:
    """Let a saved model take longer contexts."""
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = max_model_len
    (path / "config.json").write_text(json.dumps(config))


def check_a_long_answer(path: Path, device: str) -> None:
    """Every 64 blocks of an answer leave a snapshot, by a step that decodes; a next turn of the chat begins there.

    path: of a model of at least 1,100 tokens.
    """
    prompt = draw_tokens(random.Random(6), 40)
    with start(path, device) as llm:
        [(answer, _)] = generate(llm, [prompt], 1010)
        turns = [[*prompt, *answer[:end]] for end in (64 * BLOCK - 39, 1000)]
        warm = [generate(llm, [turn], 4)[0] for turn in turns]
    assert [cached for _, cached in warm] == [64 * BLOCK] * 2
    assert [tokens for tokens, _ in warm] == run_cold(path, device, turns)
