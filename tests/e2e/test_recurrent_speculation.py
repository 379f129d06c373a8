# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers on the CPU engine: drafts change no token, and no value of a logprob."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from blink import LLM
from blink.models.weights.files import default_model_path
from test_speculation_equality import KINDS, METHODS, PROMPTS, check_kind, load, outcomes
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
# What changes logits or ends answers knows no layers: test_speculation_equality.py has it in the gate.
LOGITS = {"penalties", "bias", "stop strings", "min_tokens"}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "delta-net": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "mamba": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "attention_multiplier": 0.25,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, LLM]]:
    """A model of random weights, without speculation and with each method; the prefix cache is on with one."""
    model = str(write_tiny_model(tmp_path_factory.mktemp("recurrent"), **MODELS[request.param]))
    options = {"load_format": "dummy", "tokenizer": str(default_model_path())}
    with (
        load(model, **options) as plain,
        load(model, **options, speculative_config=METHODS["ngram"]) as ngram,
        load(model, **options, speculative_config=METHODS["suffix"], enable_prefix_caching=True) as suffix,
    ):
        yield {"plain": plain, "ngram": ngram, "suffix": suffix}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind in LOGITS else kind for kind in KINDS]
)
def test_speculation_changes_no_answer_of_recurrent_layers(engines: Mapping[str, LLM], kind: str, method: str) -> None:
    check_kind((engines["plain"], engines[method]), kind)
    assert engines[method].stats()["draft_tokens"] > 0, "costs decide on drafts, so one kind alone may have none"


def test_an_answer_is_copied_from_an_equal_one_and_stays_the_same(engines: Mapping[str, LLM]) -> None:
    """With the prefix cache, where the second request begins with a snapshot of states."""
    llm, kind = engines["suffix"], {"logit_bias": dict.fromkeys(range(1000, 1300), 60.0)}
    prompt, accepted = " ".join(PROMPTS[:20]), list[int]()
    for _ in range(2):
        before = llm.stats()["accepted_tokens"]
        found = outcomes(llm, prompt, 1.5, kind, 40)
        accepted.append(llm.stats()["accepted_tokens"] - before)
        assert found[0][:2] == outcomes(engines["plain"], prompt, 1.5, kind, 40)[0][:2]
    assert accepted[1] > 30 > accepted[0] and llm.stats()["prefix_hits"] > 100
