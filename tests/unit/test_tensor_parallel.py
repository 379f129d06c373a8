# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a model: the tokens of transformers, and the bits of one rank that adds in the ranks' order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blink import LLM, SamplingParams
from blink.engine.plan_words import PlanKind, StepPlanWords
from blink.kernels.batch import Batch
from blink.kernels.layer_cache import KvCache
from blink.plan.site import Bucket
from model_families import FAMILIES, MXFP4, check, generate, make_prompts, save_model
from rank_models import RankRunner, drive_ranks, run_oracle, run_to_end
from tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(300)

PROMPTS = [*make_prompts()[2:5], make_prompts()[7]]
# One of each kind of part: heads, the vocabulary, experts, latents, recurrent states, a norm over all heads.
_FAST = {"llama-3.1", "opt-350m", "minimax_m2", "gemma4-moe", "granite4-hybrid", "qwen3_next", "deepseek_v3", MXFP4}
NAMES = [name if name in _FAST else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
# What has another shape of batched products with fewer heads differs in last bits: recurrent layers, one head of
# queries (phi3). Means over all ranks' heads are means of means. Rows that a file has once are no index of parts.
_ROUNDED = {
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "granite4-hybrid",
    "granite4-hybrid-dense",
    "phi3-short",
    "phi3-long",
}
_ROUNDED |= {"olmo2", "olmo3", "minimax_m2", "gemma4-moe", "gemma4-dense", "gemma4-heads"}
_FAST_BITS = {"llama-biased", "gemma2", "gpt_oss", "glm4_moe", "deepseek_v3"}
EXACT = [
    name if name in _FAST_BITS else pytest.param(name, marks=pytest.mark.long)
    for name in FAMILIES
    if name not in _ROUNDED
]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_tokens_and_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    check(model, PROMPTS, generate(tmp_path, PROMPTS, "cpu", tensor_parallel_size=2))


@pytest.mark.parametrize("name", ["llama-3.1", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_key_heads_are_copied_where_there_are_more_ranks(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)  # of 4 query heads, which share 2 heads of keys or a latent
    check(model, PROMPTS[:2], generate(tmp_path, PROMPTS[:2], "cpu", tensor_parallel_size=4))


@pytest.mark.parametrize("name", EXACT)
def test_ranks_compute_the_bits_of_one_that_adds_in_their_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(name, tmp_path)
    expected = run_oracle(tmp_path, 2, PROMPTS, monkeypatch)
    driver, followers = drive_ranks(tmp_path, 2)
    found = run_to_end(driver, PROMPTS)
    followers.end()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True))


class SegmentRunner(RankRunner):
    """All ranks, a layer at a time, with nothing but the residual from one to the next."""

    def forward(self, batch: Batch, kv_cache: KvCache, size: Bucket) -> None:
        runner = self.followers.runner
        residual = torch.full((size.tokens, runner.model.spec.hidden_size), torch.nan)
        for layer in range(runner.model.spec.num_layers):
            plan = StepPlanWords(PlanKind.SEGMENT, size.tokens, size.rows, False, False, layer, layer + 1)
            layers = range(layer, layer + 1)
            self.followers.run(
                plan, lambda layers=layers: runner.forward_segment(batch, kv_cache, size, layers, residual)
            )


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gemma4", marks=pytest.mark.long)])
def test_ranks_run_segments_as_whole_steps(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    found = []
    for kind in (RankRunner, SegmentRunner):
        driver, followers = drive_ranks(tmp_path, 2, runner=kind)
        found.append(run_to_end(driver, PROMPTS[:2]))
        followers.end()
    whole, cut = found
    assert [tokens for tokens, _ in cut] == [tokens for tokens, _ in whole]
    torch.testing.assert_close([one for _, one in cut], [one for _, one in whole])


def test_requests_of_all_kinds_give_what_one_rank_gives(tmp_path: Path) -> None:
    """Sampled ones by seed, several choices, logprobs, an FP8 cache, and drafts by n-grams."""
    path = str(write_tiny_model(tmp_path))
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    params = [
        plain,
        replace(plain, temperature=0.9, seed=7, n=3),
        replace(plain, logprobs=3, presence_penalty=0.5),
        replace(plain, temperature=0.7, seed=5, top_k=9, min_p=0.01),
    ]
    prompts = [[5, 6, 7, 8] * 6, [9] * 20, [3, 4, 5] * 7, [100, 7, 60]]
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    sizes: dict[str, Any] = {
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 8,
        "cpu_threads": 2,
        "load_format": "dummy",
    }
    sizes["max_model_len"] = 128
    found = []
    for size in (1, 2):
        options = {"kv_cache_dtype": "fp8", "speculative_config": drafts, "tensor_parallel_size": size, **sizes}
        with LLM(path, device="cpu", skip_tokenizer_init=True, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[choice.token_ids for choice in output.outputs] for output in outputs])
    assert found[0] == found[1]


def test_ranks_embed_as_one(tmp_path: Path) -> None:
    path, found = str(write_tiny_model(tmp_path)), list[torch.Tensor]()
    sizes: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64, "load_format": "dummy"}
    for size in (1, 2):
        options = {
            "runner": "pooling",
            "skip_tokenizer_init": True,
            "tensor_parallel_size": size,
            "cpu_threads": 2,
            **sizes,
        }
        with LLM(path, device="cpu", **options) as llm:
            outputs = llm.embed([[5, 6, 7, 8] * 5, [9, 3]], use_tqdm=False)
        found.append(torch.tensor([output.outputs.embedding for output in outputs]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
