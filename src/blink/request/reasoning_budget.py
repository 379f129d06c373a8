# SPDX-License-Identifier: Apache-2.0
"""thinking_token_budget, as what the sampler has: after how many tokens which token must end the reasoning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets
from blink.text.message.format_kinds import ReasoningFormat
from blink.text.message.parser import MessageForm
from blink.text.tokenizer import Tokenizer

_PARAM = "thinking_token_budget"
_BEGUN = -1  # in place of the token that begins reasoning


def can_limit_reasoning(assets: ModelAssets) -> bool:
    """Say whether one token each begins and ends the model's reasoning."""
    form = assets.reasoning_format
    return form is not None and all(assets.tokenizer.token_id(tag) is not None for tag in (form.open, form.close))


def limit_reasoning(
    params: SamplingParams, prompt: npt.NDArray[np.int32], form: MessageForm | None, assets: ModelAssets
) -> SamplingParams:
    """Return parameters by which the first reasoning behind a prompt ends when its budget is spent.

    form: how the reply is read, None where nobody reads it.

    Raises:
        BadRequestError: nobody knows how the model writes its reasoning, or no single token ends it.
    """
    budget = params.thinking_token_budget
    if budget is None or budget == -1:
        return params
    reasoning, tokenizer = assets.reasoning_format, assets.tokenizer
    if reasoning is None:
        told = "thinking_token_budget needs a model whose reasoning is known: start the server with --reasoning-parser."
        raise BadRequestError(told, _PARAM)
    if reasoning.uses_harmony:
        raise BadRequestError("thinking_token_budget is not for gpt-oss: set reasoning_effort.", _PARAM)
    close = _token_of(reasoning.close, tokenizer)
    is_open = _is_open(prompt, form, reasoning, tokenizer)
    opening = _BEGUN if is_open else _token_of(reasoning.open, tokenizer)
    limit = 1 + budget + (not is_open)  # the token that begins the reasoning is none of it
    return params.derive(reasoning_limit=limit, reasoning_open=opening, reasoning_close=close)


def _token_of(tag: str, tokenizer: Tokenizer) -> int:
    token = tokenizer.token_id(tag)
    if token is None:
        raise BadRequestError(f"thinking_token_budget is not supported: {tag} is no single token here.", _PARAM)
    return token


def _is_open(
    prompt: npt.NDArray[np.int32], form: MessageForm | None, reasoning: ReasoningFormat, tokenizer: Tokenizer
) -> bool:
    """Say whether the reply begins inside of its reasoning: as the form says, else by the prompt's last tag."""
    if form is not None:
        begin, end = form.reasoning_tags
        return not begin and bool(end)
    tags = [tokenizer.token_id(tag) for tag in (reasoning.open, reasoning.close)]
    places = np.flatnonzero(np.isin(prompt, [tag for tag in tags if tag is not None]))
    return bool(prompt[places[-1]] == tags[0]) if len(places) else reasoning.begins_inside
