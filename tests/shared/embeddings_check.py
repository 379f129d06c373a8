# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores of an engine against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from blink import LLM, PoolingParams
from pooling_models import END, embed, save_embedder, save_reranker, score

LENGTHS = (1, 2, 5, 16, 17, 40, 129, 300, 511, 512)  # up to all that the model takes
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64}  # so that prompts come in chunks beside others


def make_prompts() -> list[list[int]]:
    chance = np.random.default_rng(0)
    return [chance.integers(3, 1000, length).tolist() for length in LENGTHS]


def check_embeddings(path: Path, mode: str, tolerance: float, **options: Any) -> None:
    """Embed prompts of many lengths at once; each number is transformers' within `tolerance`, and no block is left."""
    model = save_embedder(path, mode)
    with LLM(str(path), **SIZES, **options) as llm:
        prompts = make_prompts()
        found = llm.embed(prompts, use_tqdm=False)
        raw = llm.embed(prompts[3], pooling_params=PoolingParams(normalize=False), use_tqdm=False)
        text = llm.embed("Hello there", use_tqdm=False)[0].prompt_token_ids
        assert llm.stats()["num_blocks_used"] == llm.stats()["num_blocks_cached"] == 0
        assert llm.stats()["finished_stop"] == len(prompts) + 2
    for prompt, output in zip(prompts, found, strict=True):
        assert output.prompt_token_ids == prompt
        expected = embed(model, prompt, mode)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=tolerance)
    expected = embed(model, prompts[3], mode, normalize=False)
    torch.testing.assert_close(torch.tensor(raw[0].outputs.embedding), expected, rtol=0, atol=10 * tolerance)
    assert text[-1] == END, "the tokenizer's own end belongs to a text"


def check_scores(path: Path, tolerance: float, *, converted: bool, tied: bool = True, **options: Any) -> None:
    """Score pairs; each score is the softmax of transformers' logits, or its classifier's sigmoid."""
    model = save_reranker(path, converted=converted, tied=tied)
    asked = {} if converted else {"convert": "classify"}
    with LLM(str(path), **SIZES, **asked, **options) as llm:
        documents = ["One fish, two fish.", "Paris", "red " * 30, ""]
        found = llm.score("What is a fish?", documents, use_tqdm=False)
        [other] = llm.score("What is a fish?", documents[1], instruction="Find towns.", use_tqdm=False)
    scores = [output.outputs.score for output in found]
    assert len({*scores, other.outputs.score}) == 5
    for output in (*found, other):
        assert abs(output.outputs.score - score(model, output.prompt_token_ids)) < tolerance
