# SPDX-License-Identifier: Apache-2.0
"""thinking_token_budget: what it comes to for the sampler, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blink.config import FrontendConfig
from blink.errors import BadRequestError
from blink.kernels.batch import Batch, Header, Param
from blink.kernels.sampling import sample
from blink.request.reasoning_budget import can_limit_reasoning, limit_reasoning
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets
from blink.text.message.parser import MessageForm
from blink.text.message.reasoning_formats import REASONING_FORMATS
from fake_engine import FakeServer
from model_driver import set_params
from small_tokenizer import MODEL, load_small_assets, with_names

BEGIN, END, OTHER = 30, 31, 5
PLAIN = load_small_assets()
QWEN, R1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]


def assets_of(form: Any, **names: int) -> ModelAssets:
    known = names or {"<think>": BEGIN, "</think>": END}
    return replace(PLAIN, tokenizer=with_names(PLAIN.tokenizer, known), reasoning_format=form)


def limits(params: SamplingParams) -> tuple[int, int, int]:
    return params.reasoning_limit, params.reasoning_open, params.reasoning_close


@pytest.mark.parametrize(
    ("reasoning", "form", "prompt", "expected"),
    [
        # Inside already: by the form, by the prompt's last tag, or because the model always is.
        (QWEN, MessageForm(reasoning=QWEN, is_reasoning_open=True), [OTHER], (8, -1, END)),
        (R1, MessageForm(reasoning=R1), [OTHER], (8, -1, END)),
        (QWEN, None, [BEGIN, END, OTHER, BEGIN], (8, -1, END)),
        (R1, None, [OTHER], (8, -1, END)),
        # To be begun by a token that is none of the budget.
        (QWEN, MessageForm(reasoning=QWEN), [OTHER], (9, BEGIN, END)),
        (QWEN, MessageForm(reasoning=QWEN, is_reasoning_open=False), [BEGIN, END], (9, BEGIN, END)),
        (QWEN, None, [OTHER], (9, BEGIN, END)),
        (R1, None, [BEGIN, OTHER, END], (9, BEGIN, END)),
    ],
)
def test_reasoning_is_closed_where_its_tokens_are_spent(
    reasoning: Any, form: MessageForm | None, prompt: list[int], expected: tuple[int, int, int]
) -> None:
    params = SamplingParams(thinking_token_budget=7)
    found = limit_reasoning(params, np.array(prompt, np.int32), form, assets_of(reasoning))
    assert limits(found) == expected


@pytest.mark.parametrize("budget", [None, -1])
def test_without_a_budget_nothing_changes(budget: int | None) -> None:
    params = SamplingParams(thinking_token_budget=budget)
    assert limit_reasoning(params, np.array([OTHER], np.int32), None, PLAIN) is params


@pytest.mark.parametrize(
    ("assets", "words"),
    [
        (PLAIN, "--reasoning-parser"),
        (assets_of(REASONING_FORMATS["openai_gptoss"]), "reasoning_effort"),
        (assets_of(QWEN, **{"<think>": BEGIN}), "</think> is no single token"),
        (assets_of(QWEN, **{"</think>": END}), "<think> is no single token"),
    ],
)
def test_what_cannot_be_kept_is_refused(assets: ModelAssets, words: str) -> None:
    params = SamplingParams(thinking_token_budget=7)
    assert not can_limit_reasoning(assets)
    with pytest.raises(BadRequestError, match=words) as refusal:
        limit_reasoning(params, np.array([OTHER], np.int32), None, assets)
    assert refusal.value.param == "thinking_token_budget"


@pytest.mark.parametrize("budget", [-2, 1 << 31, 1.5, True])
def test_a_budget_is_a_number_of_tokens(budget: Any) -> None:
    with pytest.raises(BadRequestError) as refusal:
        SamplingParams(thinking_token_budget=budget)
    assert refusal.value.param == "thinking_token_budget"


def generate(budget: int, likely: list[int], *, begun: bool, temperature: float = 0.0) -> list[int]:
    """Return what is sampled where the model would write `likely`, with 3 tokens of prompt."""
    batch = Batch.allocate(max_tokens=1, max_rows=1, num_slots=1, max_blocks=1, max_model_len=64)
    batch.header[Header.NUM_ROWS] = 1
    words = {
        Param.NUM_PROMPT_TOKENS: 3,
        Param.TEMPERATURE: temperature,
        Param.REASONING_LIMIT: 1 + budget + (not begun),
        Param.REASONING_OPEN: -1 if begun else BEGIN,
        Param.REASONING_CLOSE: END,
    }
    set_params(batch, 0, words)
    found: list[int] = []
    for token in likely:
        batch.context_lens[0] = 3 + len(found)
        logits = torch.zeros(1, 64)
        logits[0, token] = 50.0
        sample(logits, batch, 1)
        found.append(int(batch.sampled_tokens[0]))
        batch.tokens[0, 2 + len(found)] = found[-1]
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_ends_reasoning_that_is_too_long_and_leaves_the_rest(temperature: float) -> None:
    thoughts = [OTHER] * 20
    assert generate(4, thoughts, begun=True, temperature=temperature) == [OTHER] * 4 + [END] + [OTHER] * 15
    assert generate(0, thoughts, begun=True)[:2] == [END, OTHER]
    assert generate(3, [BEGIN, *thoughts], begun=False)[:6] == [BEGIN, OTHER, OTHER, OTHER, END, OTHER]
    # Tokens before it begins come on top of the budget, up to some.
    assert generate(0, [OTHER, OTHER, BEGIN, *thoughts], begun=False)[:5] == [OTHER, OTHER, BEGIN, END, OTHER]
    # Reasoning that has ended, or that has not begun, is left alone.
    short = [OTHER, END, *thoughts]
    assert generate(4, short, begun=True) == short
    assert generate(4, thoughts, begun=False) == thoughts


def test_a_chat_carries_its_budget_to_the_engine(tmp_path: Path) -> None:
    config = FrontendConfig(model=MODEL, region="test-budget")
    server = FakeServer(config, assets_of(R1), tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    assert server.post("/v1/chat/completions", {"messages": messages, "thinking_token_budget": 7}).status_code == 200
    assert limits(server.engine.submitted[-1].params) == (8, -1, END)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": messages, "max_tokens": 1500, "thinking": thinking}
    assert server.post("/v1/messages", body).status_code == 200
    assert limits(server.engine.submitted[-1].params) == (1025, -1, END)
    server.close()
    plain = FakeServer(config, PLAIN, tmp_path)
    assert plain.post("/v1/messages", body).status_code == 200
    assert limits(plain.engine.submitted[-1].params) == (0, -1, -1)
    plain.close()
