# SPDX-License-Identifier: Apache-2.0
"""Conversations with the real model: a turn computes what is new, though its text went through the tokenizer again."""

from __future__ import annotations

import pytest

from blink import LLM, SamplingParams
from blink.models.weights.files import default_model_path

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not default_model_path().is_file(), reason="the default model is not downloaded"),
]


def test_ten_turns_reuse_four_fifths_of_their_prompt_tokens() -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=60)
    messages: list[dict[str, str]] = []
    with LLM(max_model_len=2048, device="cpu") as llm:
        for turn in range(10):
            messages.append({"role": "user", "content": f"Tell me one more fact about the number {turn}."})
            [result] = llm.chat(messages, params, use_tqdm=False)
            messages.append({"role": "assistant", "content": result.outputs[0].text})
        stats = llm.stats()
    assert stats["prefix_hits"] >= 0.8 * stats["prefix_queries"] > 1000
