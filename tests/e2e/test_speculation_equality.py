# SPDX-License-Identifier: Apache-2.0
"""The CPU engine with and without speculation: tokens, logprobs' bits and finish reasons are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.config import EngineConfig, ModelConfig
from blink.engine.cpu import CpuEngine
from blink.errors import ConfigError
from blink.models.weights.files import default_model_path
from blink.structured_outputs import StructuredOutputsParams
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 5,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["fruit", "tree"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
}
CALLS = r'(<tool_call>\{"name": "weather", "arguments": \{"city": "(Rome|Bonn)"\}\}</tool_call>){2,4}'
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias": {"logit_bias": {28: 4.0, 260: 3.0, 284: -50.0}},
    "logprobs": {"logprobs": 5},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "tools": {"structured_outputs": {"regex": CALLS}},
    "n = 2": {"n": 2},
    "stop strings": {"stop": ["the", "ing"]},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, 49152, 3)), "logprobs": 0},
}
FEW_TOKENS = [28, 260, 284, *range(1000, 1012, 3)]  # so that random texts repeat themselves
TEMPERATURES = (0.0, 0.8, 1.5)
SUBJECTS = ("apples", "the sea", "old maps", "trains", "winter", "a river", "bread", "clocks", "birds", "stone walls")
FORMS = (
    "List ten facts about {0}. Each begins with: A fact about {0} is that",
    "{0}, {0}, {0}, {0},",
    "Repeat these words exactly: {0} are {0} and {0} are {0}.",
    "for item in ['{0}', '{0} again', '{0} once more']:\n    print(item)\nfor item in",
)
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]


def load(model: str, **options: Any) -> LLM:
    return LLM(model, max_num_seqs=8, enable_prefix_caching=False, max_model_len=512, cpu_threads=1, **options)


def outcomes(llm: LLM, prompt: str, temperature: float, kind: Mapping[str, Any], max_tokens: int) -> list[Any]:
    """Return all that a request tells of its choices, with the bits of every logprob."""
    chosen: dict[str, Any] = {"temperature": temperature, "seed": 11, "max_tokens": max_tokens, "logprobs": 0, **kind}
    if form := chosen.pop("structured_outputs", None):
        chosen["structured_outputs"] = StructuredOutputsParams(**form)
    [found] = llm.generate(prompt, SamplingParams(**chosen), use_tqdm=False)
    return [
        (
            choice.text,
            [*choice.token_ids],
            [{token: each.logprob.hex() for token, each in place.items()} for place in choice.logprobs or ()],
            choice.finish_reason,
            choice.stop_reason,
        )
        for choice in found.outputs
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """A model of random weights, without and with speculation."""
    model = str(write_tiny_model(tmp_path_factory.mktemp("model")))
    options = {"load_format": "dummy", "tokenizer": str(default_model_path())}
    with load(model, **options) as plain, load(model, **options, speculative_config=SPECULATIVE) as drafting:
        yield plain, drafting


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_answer(tiny: tuple[LLM, LLM], kind: str) -> None:
    plain, drafting = tiny
    before = drafting.stats()["draft_tokens"]
    asked = {"allowed_token_ids": FEW_TOKENS, **KINDS[kind]}
    if "structured_outputs" in asked:
        del asked["allowed_token_ids"]
    for temperature in TEMPERATURES:
        expected = outcomes(plain, PROMPTS[1], temperature, asked, 24)
        assert outcomes(drafting, PROMPTS[1], temperature, asked, 24) == expected, temperature
    assert drafting.stats()["draft_tokens"] > before, "no draft was verified"
    assert plain.stats()["draft_tokens"] == 0


def test_a_form_gives_more_than_one_token_a_step(tiny: tuple[LLM, LLM]) -> None:
    """Two calls have most of their tokens in common."""
    plain, drafting = tiny
    before = plain.stats()["num_steps"], drafting.stats()["num_steps"], drafting.stats()["accepted_tokens"]
    expected = outcomes(plain, PROMPTS[0], 0.8, KINDS["tools"], 200)
    assert outcomes(drafting, PROMPTS[0], 0.8, KINDS["tools"], 200) == expected
    steps = plain.stats()["num_steps"] - before[0], drafting.stats()["num_steps"] - before[1]
    assert drafting.stats()["accepted_tokens"] - before[2] == steps[0] - steps[1] > steps[0] // 4


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_answer_of_a_real_model(kind: str) -> None:
    options: dict[str, Any] = {"speculative_config": SPECULATIVE, "dtype": "float32"}
    with load("", dtype="float32") as plain, load("", **options) as drafting:
        for prompt in PROMPTS:
            for temperature in TEMPERATURES:
                expected = outcomes(plain, prompt, temperature, KINDS[kind], 24)
                assert outcomes(drafting, prompt, temperature, KINDS[kind], 24) == expected, (prompt, temperature)
        assert drafting.stats()["accepted_tokens"] > 50


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"method": "eagle3", "model": "x", "num_speculative_tokens": 3}, "eagle3.*not yet"),
        ({"method": "suffix"}, "suffix.*not yet"),
        ({"model": "x"}, "draft_model.*not yet"),
        ({"method": "magic"}, "magic.*unknown"),
        ({"method": "ngram", "num_speculative_tokens": 16}, "num_speculative_tokens.*between 1 and 15"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 3}, "prompt_lookup_min.*between 1 and 3"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "rejection_sample_method"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
    ],
)
def test_what_is_not_done_is_refused_before_the_model_is_loaded(config: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CpuEngine(EngineConfig(model=ModelConfig(model="/nowhere"), speculative_config=json.dumps(config)))
