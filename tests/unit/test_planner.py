# SPDX-License-Identifier: Apache-2.0
"""What a request's choices ask of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blink.config import FrontendConfig, ModelConfig
from blink.errors import BadRequestError
from blink.request.planner import Planner, check_request
from blink.sampling_params import SamplingParams
from blink.text.assets import load_assets
from blink.text.prompt import PromptRules
from fake_engine import ENGINE
from tiny_model import write_tiny_model


def test_one_choice_alone_asks_for_the_logprobs_of_its_prompt(tmp_path: Path) -> None:
    model = ModelConfig(model=str(write_tiny_model(tmp_path)), skip_tokenizer_init=True)
    planner = Planner(load_assets(FrontendConfig(model=model)))
    params = SamplingParams(n=3, prompt_logprobs=2, seed=7, max_tokens=1)
    plan = planner.plan_now(
        [[1, 2, 3], [4, 5]], params, PromptRules(add_special_tokens=False), replace(ENGINE, max_model_len=64)
    )
    assert [planned.params.prompt_logprobs for planned in plan.sequences] == [2, None, None] * 2
    assert [planned.seed for planned in plan.sequences] == [7, 8, 9] * 2


def test_a_servers_seed_makes_those_of_requests_that_give_none(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path))
    rules, engine = PromptRules(add_special_tokens=False), replace(ENGINE, max_model_len=64)

    def seeds(seed: int) -> list[int]:
        model = ModelConfig(model=folder, skip_tokenizer_init=True, seed=seed)
        planner = Planner(load_assets(FrontendConfig(model=model)))
        plans = [planner.plan_now([[1, 2]], SamplingParams(max_tokens=1), rules, engine) for _ in range(4)]
        return [planned.seed for plan in plans for planned in plan.sequences]

    assert seeds(42) == seeds(42) != seeds(43)
    assert len({*seeds(42), *seeds(0), *seeds(0)}) == 12


@pytest.mark.parametrize("param", ["stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"])
def test_the_first_token_id_beyond_the_vocabulary_is_refused_by_name(param: str) -> None:
    def ask(token: int) -> SamplingParams:
        options: dict[str, Any] = {param: {token: 1.0} if param == "logit_bias" else [token]}
        return SamplingParams(max_tokens=1, **options)

    check_request(ask(ENGINE.vocab_size - 1), 1, ENGINE)
    with pytest.raises(BadRequestError, match=f"{ENGINE.vocab_size} is not a token id") as caught:
        check_request(ask(ENGINE.vocab_size), 1, ENGINE)
    assert caught.value.param == param
