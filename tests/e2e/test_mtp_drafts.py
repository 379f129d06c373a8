# SPDX-License-Identifier: Apache-2.0
"""The CPU engine with a model's own draft layer (MTP): it takes fewer steps, and gives the same answers.

The model has recurrent layers. With noise they lead the text another way than the layer drafts, at any place of a
draft: then what the states have taken in decides on the next token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink import LLM, SamplingParams
from blink.errors import ConfigError
from blink.models.weights.files import default_model_path
from blink.request.source import TokensPrompt
from free_drafts import load_without_costs
from mtp_layers import write_clockwork
from tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model's tokenizer is not downloaded"),
]
VOCAB, LENGTH, DRAFTS = 49152, 96, 4  # the tokenizer's
PROMPT = [300 + 7 * at for at in range(40)]
OPTIONS: dict[str, Any] = {"tokenizer": str(default_model_path()), "max_model_len": 512, "cpu_threads": 1}
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS})


Engines = tuple[LLM, LLM, bool]


@pytest.fixture(scope="module", params=[0.0, 0.022])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The model without and with drafts, and whether its text is known."""
    model = str(write_clockwork(tmp_path_factory.mktemp("clockwork"), VOCAB, noise=request.param))
    with (
        load_without_costs(model, **OPTIONS) as plain,
        load_without_costs(model, **OPTIONS, speculative_config=MTP) as drafting,
    ):
        yield plain, drafting, request.param == 0


def answer(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    found = llm.generate(asked, SamplingParams(max_tokens=LENGTH, ignore_eos=True, **params), use_tqdm=False)
    return [[*each.outputs[0].token_ids] for each in found]


def count(llm: LLM, *names: str) -> list[int]:
    return [int(llm.stats()[name]) for name in names]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 8.0])
def test_one_sequence_takes_fewer_steps(engines: Engines, temperature: float) -> None:
    """At the last temperature the likeliest token is hardly ever sampled: the layer samples with the model's noise."""
    plain, drafting, is_known = engines
    params = {"temperature": temperature, "seed": 3}
    before = count(drafting, "num_steps", "draft_tokens", "accepted_tokens")
    [expected], [found] = answer(plain, [PROMPT], **params), answer(drafting, [PROMPT], **params)
    after = count(drafting, "num_steps", "draft_tokens", "accepted_tokens")
    steps, drafts, accepted = (now - then for now, then in zip(after, before, strict=True))
    assert found == expected and len({*found}) > 80
    if is_known:
        assert accepted > 70 and steps < 26
    elif not is_known:
        assert 15 < accepted < drafts - 10


def test_many_sequences_and_chunks_are_drafted_for_at_once(engines: Engines) -> None:
    plain, drafting, _ = engines
    prompts = [PROMPT[at:] * (1 + at % 9) for at in range(12)]  # some take several steps
    [before] = count(drafting, "accepted_tokens")
    assert answer(drafting, prompts, temperature=0) == answer(plain, prompts, temperature=0)
    assert count(drafting, "accepted_tokens")[0] - before > 200


def test_a_cached_prefix_is_kept_and_drafts_go_on_from_it(engines: Engines) -> None:
    """Blocks have what the layer keeps of a prompt, and a snapshot what the recurrent layers do."""
    plain, drafting, _ = engines
    prompt = [2000 + 3 * at for at in range(160)]
    [expected] = answer(plain, [prompt], temperature=0)
    accepted = []
    for cached in (0, 9 * 16):
        before = count(drafting, "accepted_tokens", "prefix_hits")
        assert answer(drafting, [prompt], temperature=0) == [expected]
        after = count(drafting, "accepted_tokens", "prefix_hits")
        accepted.append(after[0] - before[0])
        assert after[1] - before[1] == cached
    assert accepted[0] == accepted[1] > 15


def test_sequences_that_are_preempted_go_on_as_they_were(tmp_path: Path) -> None:
    """In few blocks some are computed again: what their states had taken in is taken in again."""
    model = str(write_clockwork(tmp_path, VOCAB, noise=0.022))
    prompts = [PROMPT[at : at + 24] for at in range(10)]
    with load_without_costs(model, **OPTIONS) as plain:
        expected = answer(plain, prompts, temperature=0.7, seed=5)
    with load_without_costs(model, **OPTIONS, speculative_config=MTP, num_gpu_blocks_override=34) as drafting:
        assert answer(drafting, prompts, temperature=0.7, seed=5) == expected
        assert min(count(drafting, "accepted_tokens", "num_preemptions")) > 0


def test_what_has_no_draft_layer_is_refused_at_boot(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path))
    with pytest.raises(ConfigError, match=r"no draft layer \(MTP\) of llama"):
        LLM(model, load_format="dummy", **OPTIONS, speculative_config=MTP)
