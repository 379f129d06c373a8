# SPDX-License-Identifier: Apache-2.0
"""A model that would reason for ever is stopped where its budget is spent, by the engine itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from blink import LLM, SamplingParams
from harmony_model import build_tokenizer
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SPECIAL = ("<|endoftext|>", "<think>", "</think>")
TEMPLATE = "{{ messages[-1].content }}{% if true %}<think>{% else %}</think>{% endif %}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("thinker")
    tokenizer = build_tokenizer(special=SPECIAL)
    end = tokenizer.token_to_id(SPECIAL[0])
    assert end is not None
    write_tiny_model(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0], "chat_template": TEMPLATE}))
    with LLM(
        str(folder), load_format="dummy", max_model_len=200, cpu_threads=1, region=f"test-budget-{os.getpid()}"
    ) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_marker_comes_when_the_budget_is_spent_and_once(llm: LLM, temperature: float) -> None:
    begin, end = (build_tokenizer(special=SPECIAL).token_to_id(tag) for tag in SPECIAL[1:])
    assert begin is not None and end is not None
    never = {begin: -100.0, end: -100.0}  # of itself the model writes neither
    params = [
        SamplingParams(
            max_tokens=40, thinking_token_budget=budget, logit_bias=never, temperature=temperature, ignore_eos=True
        )
        for budget in (0, 5, 17, 60, None)
    ]
    outputs = llm.chat([[{"role": "user", "content": "Why?"}]] * len(params), params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert [[place for place, token in enumerate(tokens) if token == end] for tokens in found] == [
        [0],
        [5],
        [17],
        [],
        [],
    ]
    assert all(len(tokens) == 40 for tokens in found)
    # A prompt that has not begun to reason, and a model that does not: there is nothing to end.
    [plain] = llm.generate(["Why?"], params[1], use_tqdm=False)
    assert end not in plain.outputs[0].token_ids
