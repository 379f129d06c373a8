# SPDX-License-Identifier: Apache-2.0
"""What --speculative-config asks for. Models whose layers do not verify drafts refuse them by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.errors import ConfigError
from blink.models.weights.source import read_spec
from blink.region.layout import CONSTANTS
from blink.speculation import MAX_DRAFTS, Speculation, check_on_gpu, read_speculation

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
DRAFTING = Speculation(num_tokens=3, ngram_min=2, ngram_max=5)


@pytest.mark.parametrize(
    ("config", "num_ranks", "told"),
    [
        ("glm-4.7-flash", 1, "latent attention"),
        ("gemma-4-31b", 1, "a sliding window"),
        ("qwen3.6-27b", 2, "recurrent layers on several GPUs"),
        ("qwen3.6-27b", 1, ""),
        ("llama-3-70b", 2, ""),
    ],
)
def test_layers_that_are_not_verified_on_gpus_refuse_drafts(config: str, num_ranks: int, told: str) -> None:
    model = read_spec(CONFIGS / config)
    check_on_gpu(Speculation(), model, num_ranks)
    if told:
        with pytest.raises(ConfigError, match=f"{told} do not.*--device cpu"):
            check_on_gpu(DRAFTING, model, num_ranks)
    else:
        check_on_gpu(DRAFTING, model, num_ranks)


def test_suffix_decoding_has_the_defaults_of_vllm_and_its_fields() -> None:
    found = read_speculation({"method": "suffix"})
    assert (found.num_tokens, found.suffix_depth, found.suffix_factor, found.suffix_chance) == (15, 24, 256, 26)
    assert found.num_answers == 10_000
    fields = {"max_tree_depth": 8, "max_spec_factor": 1.5, "min_token_prob": 0.5, "max_cached_requests": 0}
    asked = read_speculation({"method": "suffix"} | {f"suffix_decoding_{name}": fields[name] for name in fields})
    assert (asked.suffix_depth, asked.suffix_factor, asked.suffix_chance, asked.num_answers) == (8, 384, 128, 0)


def test_the_most_of_drafts_and_ngrams_are_those_of_the_region() -> None:
    longest = read_speculation({"prompt_lookup_max": CONSTANTS["most_ngram"]})
    assert longest.ngram_max == CONSTANTS["most_ngram"] and CONSTANTS["max_drafts"] == MAX_DRAFTS
    with pytest.raises(ConfigError, match="prompt_lookup_max"):
        read_speculation({"prompt_lookup_max": CONSTANTS["most_ngram"] + 1})


@pytest.mark.parametrize(("num_answers", "tokens"), [(0, 0), (3, 256), (10_000, 1 << 18)])
def test_recent_answers_take_a_bounded_ring(num_answers: int, tokens: int) -> None:
    """Of 64 tokens each, while that is less than the most."""
    spec = f'{{"method": "suffix", "suffix_decoding_max_cached_requests": {num_answers}}}'
    config = EngineConfig(speculative_config=spec)
    geometry = build_geometry(config, max_model_len=64, vocab_size=9, num_blocks=8)
    assert (geometry["num_answers"], geometry["answer_tokens"]) == (num_answers, tokens)
    assert geometry["answer_entries"] == 4 * tokens
