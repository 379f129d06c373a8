# SPDX-License-Identifier: Apache-2.0
"""What a response says of its tokens: usage and logprobs, whatever the engine gave."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink.api.openai.choices import usage_of
from blink.api.openai.logprobs import LogprobFormat
from blink.text.generation import Generation, TokenLogprob
from blink.text.prompt import Prompt
from blink.text.tokenizer import NoTokenizer

NEVER = -math.inf


def generations_of(*tokens: tuple[int, int]) -> list[Generation]:
    """Sequences with so many tokens of output and so many of the prompt from the cache."""
    return [
        cast(Generation, SimpleNamespace(num_tokens=new, cached_tokens=cached, reasoning_tokens=2, predicted=(1, 0)))
        for new, cached in tokens
    ]


def prompts_of(*lengths: int) -> list[Prompt]:
    return [cast(Prompt, SimpleNamespace(num_tokens=length)) for length in lengths]


def test_a_prompt_counts_once_with_the_cache_hits_of_its_first_choice() -> None:
    usage = usage_of(prompts_of(40, 70), generations_of((5, 16), (6, 32), (7, 32), (1, 64), (2, 64), (3, 64)), 3)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16 + 64}
    details = {"reasoning_tokens": 6 * 2, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 0}
    assert usage["completion_tokens_details"] == details
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (110, 24, 134)


def test_every_prompt_of_a_request_brings_its_own_hits() -> None:
    usage = usage_of(prompts_of(40, 70), generations_of((5, 16), (6, 32)), 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 48}


@pytest.mark.parametrize("as_token_ids", [False, True])
@pytest.mark.parametrize("logprob", [NEVER, -1e30, -3.0])
def test_every_logprob_that_is_sent_is_a_number(logprob: float, as_token_ids: bool) -> None:
    form = LogprobFormat(NoTokenizer(), as_token_ids=as_token_ids)
    entries = [TokenLogprob(5, logprob, [(6, -0.5), (7, logprob)]), TokenLogprob(8, -0.1, [])]
    shapes: list[Any] = [form.completion(entries, 0), form.echoed(3, entries), form.prompt(entries), form.chat(entries)]
    for shape in shapes:
        sent = json.loads(json.dumps(shape, allow_nan=False))  # what is no number raises
        assert str(max(logprob, -9999.0)) in json.dumps(sent)
