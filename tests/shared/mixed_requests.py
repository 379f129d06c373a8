# SPDX-License-Identifier: Apache-2.0
"""Requests of mixed kinds, and how answers of several ranks may differ from those of one."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from blink import LLM, RequestOutput, SamplingParams
from tiny_model import write_tiny_model

Requests = tuple[list[list[int]], list[SamplingParams]]
_NEAR = 1e-4  # log probabilities that sums in another order may put in another order
_MOST_CHANCES = 3e-4  # of answers: a sampled token changes where a threshold lies within rounding
_VOCAB = 128
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}  # GPUs take no smaller heads
_SIZES = {"hidden_size": 64, "intermediate_size": 128, **_HEADS}


def check_ranks(folder: Path, count: int, *, ranks: int = 2, **options: Any) -> None:
    """Compare the answers of some ranks to so many requests with those of one."""
    path, requests = str(write_tiny_model(folder, **_SIZES)), make_requests(count)
    one, many = (run(path, requests, tensor_parallel_size=size, **options) for size in (1, ranks))
    differing = Counter(differ(a, b, params) for a, b, params in zip(one, many, requests[1], strict=True))
    assert differing["wrong"] == 0
    assert differing["by chance"] <= _MOST_CHANCES * count


def make_requests(count: int) -> Requests:
    """Return prompts, of which many begin alike, and what each asks for."""
    rng = random.Random(11)
    shared = [[rng.randrange(3, _VOCAB) for _ in range(40)] for _ in range(8)]
    prompts, params = [], []
    for seed in range(count):
        own = [rng.randrange(3, _VOCAB) for _ in range(rng.randrange(1, 30))]
        prompts.append(rng.choice(shared)[: rng.randrange(41)] + own)
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
            {"temperature": 0.0, "logit_bias": {17: 3.0, 40: -5.0}},
            {"temperature": 0.8, "seed": seed, "n": 2},
            {"temperature": 1.0, "seed": seed, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
            {"temperature": 0.7, "seed": seed, "stop_token_ids": [9, 33]},
        ]
        params.append(SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True, **rng.choice(kinds)))
    return prompts, params


def run(path: str, requests: Requests, **options: Any) -> list[RequestOutput]:
    sizes: dict[str, Any] = {"max_num_seqs": 48, "max_model_len": 128, "num_gpu_blocks_override": 500}
    with LLM(path, load_format="dummy", skip_tokenizer_init=True, **sizes, **options) as llm:
        return llm.generate(*requests, use_tqdm=False)


def differ(one: RequestOutput, other: RequestOutput, params: SamplingParams) -> str:
    """Tell how two answers to a request differ: not, by what rounding explains, or otherwise."""
    tokens = [[choice.token_ids for choice in output.outputs] for output in (one, other)]
    assert len(tokens[1]) == params.n
    if tokens[0] == tokens[1]:
        return "not"
    if params.temperature > 0:
        return "by chance"
    return "by chance" if params.logprobs and is_tie(one, other) else "wrong"


def is_tie(one: RequestOutput, other: RequestOutput) -> bool:
    """Tell whether the first token that differs had two best ones of the same log probability."""
    pairs = enumerate(zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=False))
    place = next(index for index, (a, b) in pairs if a != b)
    best = sorted((token.logprob for token in (one.outputs[0].logprobs or [])[place].values()), reverse=True)
    return best[0] - best[1] < _NEAR
