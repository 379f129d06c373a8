# SPDX-License-Identifier: Apache-2.0
"""`--deterministic` on the CPU engine: tokens and the bits of logprobs do not depend on what else a step computes."""

from __future__ import annotations

from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.errors import ConfigError
from blink.models.weights.files import default_model_path
from free_drafts import load_without_costs
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not downloaded"),
]
PROMPT = "A list of ten facts about the sea. Each begins with: a fact about the sea is that its water. " * 2
OTHERS = [f"Write a long story about {name}, in which {name} finds a ship" for name in ("Ann", "Bo", "Cy", "Di", "Ed")]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def load(chunk: int, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"max_num_seqs": min(chunk, 8), "max_num_batched_tokens": chunk, "max_model_len": 256}
    chosen |= {"enable_prefix_caching": False, "deterministic": True, "cpu_threads": 2}
    return load_without_costs("", **(chosen | options))


def ask(llm: LLM, prompts: list[str], temperature: float, max_tokens: int) -> Any:
    """Return the first prompt's tokens, and the logprobs of its answer and of itself."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=max_tokens, logprobs=3, prompt_logprobs=0)
    found = llm.generate(prompts, params, use_tqdm=False)[0]
    [answer] = found.outputs
    places = [*(answer.logprobs or []), *(found.prompt_logprobs or [])[1:]]
    return [*answer.token_ids], [{token: each.logprob for token, each in (place or {}).items()} for place in places]


def fingerprint_of(llm: LLM) -> str:
    """Return what the engine tells frontends."""
    return vars(llm)["_client"].fingerprint


def judge(chunks: tuple[int, ...], temperatures: tuple[float, ...], max_tokens: int) -> None:
    """Compare the answers of chunks of any length, alone and among others, with those of the whole prompt alone."""
    with load(256) as llm:
        expected = {at: ask(llm, [PROMPT], at, max_tokens) for at in temperatures}
    for chunk in chunks:
        with load(chunk) as llm:
            for at in temperatures:
                assert ask(llm, [PROMPT], at, max_tokens) == expected[at], chunk
                assert ask(llm, [PROMPT, *OTHERS], at, max_tokens) == expected[at], chunk


@pytest.mark.long
def test_bits_do_not_depend_on_chunks_and_neighbours() -> None:
    judge((9,), (0.8,), 4)


@pytest.mark.long
def test_bits_do_not_depend_on_any_chunks() -> None:
    judge((2, 3, 5, 8, 17, 40, 63, 64, 65), (0.0, 0.8, 1.5), 24)


@pytest.mark.long
def test_bits_do_not_depend_on_the_prefix_cache_preemption_and_drafts() -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40, logprobs=3, ignore_eos=True)

    def answers(llm: LLM, prompts: list[str]) -> list[Any]:
        found = llm.generate(prompts, params, use_tqdm=False)
        choices = [one.outputs[0] for one in found]
        return [
            ([*one.token_ids], [{token: each.logprob for token, each in place.items()} for place in one.logprobs or []])
            for one in choices
        ]

    prompts = [PROMPT, *OTHERS]
    with load(64) as llm:
        expected = [answers(llm, [prompt])[0] for prompt in prompts]
        fingerprint = fingerprint_of(llm)
        assert fingerprint.startswith("cpu-")
    with load(64, enable_prefix_caching=True) as llm:
        assert answers(llm, prompts) == answers(llm, prompts) == expected
        assert llm.stats()["prefix_hits"] > 0
    with load(64, num_gpu_blocks_override=16) as llm:
        assert answers(llm, prompts) == expected
        assert llm.stats()["num_preemptions"] > 0
    with load(64, speculative_config=SPECULATIVE) as llm:
        assert answers(llm, prompts) == expected
        assert llm.stats()["accepted_tokens"] > 0
        assert fingerprint_of(llm) == fingerprint


def test_weights_whose_rows_depend_on_each_other_are_refused(tmp_path: Any) -> None:
    model = str(write_tiny_model(tmp_path))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"deterministic.*other formats than GGUF"):
        LLM(model, deterministic=True, **options)
    with pytest.raises(ConfigError, match=r"deterministic.*one rank"):
        LLM(model, deterministic=True, tensor_parallel_size=2, **options)
