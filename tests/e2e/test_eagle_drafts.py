# SPDX-License-Identifier: Apache-2.0
"""The CPU engine with a draft head that knows the model's text: it takes fewer steps, and gives the same answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.errors import ConfigError
from blink.models.weights.files import default_model_path
from blink.request.source import TokensPrompt
from eagle_heads import draw_head, write_clockwork, write_head
from free_drafts import load_without_costs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
VOCAB, LENGTH = 49152, 96  # the tokenizer's
PROMPT = [300 + 7 * at for at in range(40)]
OPTIONS: dict[str, Any] = {"tokenizer": str(default_model_path()), "max_model_len": 512, "cpu_threads": 1}


def head_at(folder: Path, **fields: Any) -> str:
    return json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, **fields})


@pytest.fixture(scope="module")
def clockwork(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_clockwork(tmp_path_factory.mktemp("clockwork"), VOCAB, range(VOCAB))


@pytest.fixture(scope="module")
def engines(clockwork: tuple[Path, Path]) -> Iterator[tuple[LLM, LLM]]:
    model, head = clockwork
    with (
        load_without_costs(str(model), **OPTIONS) as plain,
        load_without_costs(str(model), **OPTIONS, speculative_config=head_at(head)) as drafting,
    ):
        yield plain, drafting


def answer(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    found = llm.generate(asked, SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params), use_tqdm=False)
    return [[*each.outputs[0].token_ids] for each in found]


def count(llm: LLM, *names: str) -> list[int]:
    return [int(llm.stats()[name]) for name in names]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_knows_the_text_takes_a_quarter_of_the_steps(engines: tuple[LLM, LLM], temperature: float) -> None:
    plain, drafting = engines
    params = {"temperature": temperature, "seed": 3}
    before = count(drafting, "num_steps", "accepted_tokens")
    [expected], [found] = answer(plain, [PROMPT], **params), answer(drafting, [PROMPT], **params)
    steps, accepted = (
        now - then for now, then in zip(count(drafting, "num_steps", "accepted_tokens"), before, strict=True)
    )
    assert found == expected and len({*found}) > 90
    assert accepted > 66 and steps < 32


def test_a_head_samples_with_the_noise_of_its_model(engines: tuple[LLM, LLM]) -> None:
    """So hot that the likeliest token is hardly ever sampled: a head whose logits are the model's guesses what is."""
    plain, drafting = engines
    for params in ({}, {"top_k": 400}, {"top_p": 0.8, "min_p": 0.001}, {"logit_bias": {400: 20.0, 500: 20.0}}):
        params |= {"temperature": 8.0, "seed": 3}
        before = count(drafting, "num_steps", "accepted_tokens")
        [expected], [found] = answer(plain, [PROMPT], **params), answer(drafting, [PROMPT], **params)
        after = count(drafting, "num_steps", "accepted_tokens")
        steps, accepted = (now - then for now, then in zip(after, before, strict=True))
        assert found == expected
        assert accepted > 66 and steps < 32, params


def test_many_sequences_and_chunks_are_drafted_for_at_once(engines: tuple[LLM, LLM]) -> None:
    plain, drafting = engines
    prompts = [PROMPT[at:] * (1 + at % 9) for at in range(12)]  # some take several steps
    [before] = count(drafting, "accepted_tokens")
    assert answer(drafting, prompts, temperature=0) == answer(plain, prompts, temperature=0)
    assert count(drafting, "accepted_tokens")[0] - before > 300


def test_a_cached_prefix_is_kept_and_drafts_go_on_from_it(engines: tuple[LLM, LLM]) -> None:
    """What the head keeps of a prompt lies in the prompt's blocks: the second answer is drafted as the first was."""
    plain, drafting = engines
    prompt = [2000 + 3 * at for at in range(160)]
    [expected] = answer(plain, [prompt], temperature=0)
    accepted = []
    for cached in (0, 9 * 16):
        before = count(drafting, "accepted_tokens", "prefix_hits")
        assert answer(drafting, [prompt], temperature=0) == [expected]
        after = count(drafting, "accepted_tokens", "prefix_hits")
        accepted.append(after[0] - before[0])
        assert after[1] - before[1] == cached
    assert accepted[0] == accepted[1] > 66


def test_steps_of_prompt_logprobs_are_read_too(engines: tuple[LLM, LLM]) -> None:
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    [plain], [drafted] = (llm.generate(prompt, params, use_tqdm=False) for llm in engines)
    for told, known in zip(drafted.prompt_logprobs or (), plain.prompt_logprobs or (), strict=True):
        assert (told is None) == (known is None)
        if told is not None and known is not None:
            values, expected = ({token: each.logprob for token, each in found.items()} for found in (told, known))
            assert values == pytest.approx(expected, abs=1e-4)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(drafted.prompt_logprobs or ()) == len(PROMPT)


def test_tokens_that_the_head_has_not_are_computed_one_by_one(clockwork: tuple[Path, Path], tmp_path: Path) -> None:
    """A head of half the vocabulary drafts about half of the text."""
    model, head = write_clockwork(tmp_path, VOCAB, range(0, VOCAB, 2))
    del clockwork
    with load_without_costs(str(model), **OPTIONS, speculative_config=head_at(head)) as drafting:
        [found] = answer(drafting, [PROMPT], temperature=0)
        drafts, accepted = count(drafting, "draft_tokens", "accepted_tokens")
        assert 15 < accepted < 60 and drafts > accepted
        successors = dict(itertools.pairwise(found))
        [again] = answer(drafting, [[*PROMPT[:3], found[10]]], temperature=0)
        assert again[0] == successors[found[10]]


@pytest.mark.parametrize("is_random", [True, False])
def test_a_wrong_head_changes_nothing(
    clockwork: tuple[Path, Path], engines: tuple[LLM, LLM], tmp_path: Path, is_random: bool
) -> None:
    """Random weights; and weights of another size for the same tokens, which are zeros: a head that was cut off."""
    tensors = draw_head(VOCAB, range(VOCAB), seed=9)
    if not is_random:
        tensors |= {name: 0 * tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    head = write_head(tmp_path / "head", tensors, (0, 1, 1))
    with load_without_costs(str(clockwork[0]), **OPTIONS, speculative_config=head_at(head)) as drafting:
        assert answer(drafting, [PROMPT], temperature=0) == answer(engines[0], [PROMPT], temperature=0)
        assert count(drafting, "num_drafts")[0] > 0


def test_weights_that_are_loaded_anew_have_their_head(clockwork: tuple[Path, Path]) -> None:
    model, head = clockwork
    with load_without_costs(str(model), **OPTIONS, speculative_config=head_at(head)) as drafting:
        first = answer(drafting, [PROMPT], temperature=0)
        drafting.sleep(level=1)
        drafting.wake_up()
        [before] = count(drafting, "accepted_tokens")
        assert answer(drafting, [PROMPT], temperature=0) == first
        assert count(drafting, "accepted_tokens")[0] - before > 60


def test_engines_that_run_no_head_name_it(clockwork: tuple[Path, Path]) -> None:
    model, head = clockwork
    with pytest.raises(ConfigError, match=r"draft heads.*--tensor-parallel-size 2"):
        LLM(str(model), **OPTIONS, speculative_config=head_at(head), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LLM(str(model), **OPTIONS, speculative_config=head_at(head / "nowhere"))
