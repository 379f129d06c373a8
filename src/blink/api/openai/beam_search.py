# SPDX-License-Identifier: Apache-2.0
"""Beam search as vLLM's completions and chats ask for it: use_beam_search, with n as the number of beams."""

from __future__ import annotations

from blink.api.openai.schema import ChatBody, CompletionBody
from blink.beam_search_params import BeamSearchParams
from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams

# What a search does not keep to. Those that only steer chance, such as temperature and seed, have no effect on it.
_UNKEPT = (
    "stop", "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "thinking_token_budget", "prompt_logprobs", "structured_outputs",
)  # fmt: skip


def read_beam_search(body: CompletionBody | ChatBody, params: SamplingParams) -> BeamSearchParams | None:
    """Return how the answers are searched for; None if they are sampled.

    A request without max_tokens gets 1 here: what fits is known when its prompts are.

    Raises:
        BadRequestError: a field asks for what a search does not do, or only a search does; `param` names it.
    """
    width = body.best_of or params.n
    if not body.use_beam_search:
        if name := _find_search_field(body, width, params.n):
            raise BadRequestError(f"{name} needs use_beam_search.", name)
        return None
    _check_search(body, width, params)
    return BeamSearchParams(
        beam_width=width,
        max_tokens=1 if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        early_stopping=body.early_stopping is True,
    )


def _find_search_field(body: CompletionBody | ChatBody, width: int, n: int) -> str | None:
    """Return the name of a field that only a search obeys, None if there is none."""
    if width != n:
        return "best_of"
    if body.length_penalty != 1:
        return "length_penalty"
    return "early_stopping" if body.early_stopping else None


def _check_search(body: CompletionBody | ChatBody, width: int, params: SamplingParams) -> None:
    if body.stream:
        raise BadRequestError("A beam search knows its text at the end only: it cannot be streamed.", "stream")
    if width < params.n:
        raise BadRequestError(f"best_of must be at least n, which is {params.n}, got {width}.", "best_of")
    usual = SamplingParams()
    for name in _UNKEPT:
        # Penalties of the model's own defaults are no wish of the client's.
        is_asked = getattr(body, name, None) is not None
        if is_asked and getattr(params, name) not in (None, (), [], {}, getattr(usual, name)):
            raise BadRequestError(f"Beam search cannot be combined with {name}.", name)
    if params.structured_outputs is not None:
        raise BadRequestError("Beam search cannot be combined with response_format.", "response_format")
    if params.prompt_logprobs is not None:
        raise BadRequestError("Beam search with echo gives no logprobs.", "logprobs")
    if isinstance(body, ChatBody) and body.tool_use is not None and body.tool_use.is_binding:
        raise BadRequestError("Beam search cannot be combined with a forced tool call.", "tool_choice")
