# SPDX-License-Identifier: Apache-2.0
"""What completions and chats make of their checked bodies: tokens and parameters for the engine, and their reply.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

import time
from typing import Any

from blink.api.openai.beam_search import read_beam_search
from blink.api.openai.choices import ChoicesReply
from blink.api.openai.message_form import message_form
from blink.api.openai.request_template import rendering_of
from blink.api.openai.sampling import build_sampling_params
from blink.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.request.rendering import render_messages
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets
from blink.text.conversation import flatten_messages
from blink.text.fill_in import fill_in
from blink.text.message import harmony
from blink.text.message.reasoning import is_reasoning_open, is_switched_off
from blink.text.prompt import read_tokens

_TEXTS = {"prompt", "suffix", "bad_words", "messages", "tools", "documents", "stop", "user", "cache_salt"}
_TEXTS |= {"response_format", "structured_outputs", "functions", "chat_template", "vllm_xargs"}
_MAX_SHOWN_CHARS = 256
_NEEDS_CONTENT = "force_nonempty_content"  # variable of a chat template, by which an answer has content in any case


def read_completion(body: CompletionBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Tokenize the prompts of a completion."""
    parsed_at, sources = time.perf_counter(), body.prompts
    _check_count(len(sources), body, engine)
    rules, tokenizer = body.prompt_rules, assets.tokenizer
    if body.suffix:
        prompts = [fill_in(source, body.suffix, rules, tokenizer, engine) for source in sources]
    else:
        prompts = [read_tokens(source, rules, tokenizer, engine) for source in sources]
    echoes = [text_of(source, assets) for source in sources] if body.echo else []
    params = build_sampling_params(body, assets.sampling_defaults)
    return ParsedRequest(
        model=body.model,
        prompts=prompts,
        rules=rules,
        params=params,
        search=read_beam_search(body, params),
        reply=ChoicesReply(is_chat=False, echoes=echoes, **_reply_fields(body, params, bounds)),
        stream=bool(body.stream),
        request_id=body.request_id,
        shown=_shown(body) if bounds.shows_fields else {},
        parsed_at=parsed_at,
    )


def read_chat(body: ChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize a conversation."""
    parsed_at = time.perf_counter()
    rendering = rendering_of(body, assets, bounds)
    given = body.kv_transfer_params
    source = render_messages(body.messages, rendering, assets) if given is None else given.prompt_token_ids
    _check_count(1, body, engine)
    rules = body.prompt_rules
    tokens = read_tokens(source, rules, assets.tokenizer, engine)
    text = text_of(source, assets)
    params = build_sampling_params(body, assets.sampling_defaults)
    form = message_form(
        body,
        assets,
        may_choose=bounds.may_choose_calls,
        prompt=text,
        is_reasoning_open=_is_reasoning_open(text, body, assets),
        is_answer=body.continue_final_message or is_switched_off(rendering.variables),
        needs_content=rendering.variables.get(_NEEDS_CONTENT) is True,
    )
    role = "assistant" if body.add_generation_prompt else body.messages[-1].get("role", "assistant")
    echoes = [_last_text(body, role)] if body.echo else []
    return ParsedRequest(
        model=body.model,
        prompts=[tokens],
        rules=rules,
        params=params,
        tool_use=body.tool_use,
        search=read_beam_search(body, params),
        reply=ChoicesReply(
            is_chat=True,
            role=role,
            message=form,
            echoes=echoes,
            calls_functions=bool(body.functions),
            **_reply_fields(body, params, bounds),
        ),
        stream=bool(body.stream),
        request_id=body.request_id,
        shown=_shown(body) if bounds.shows_fields else {},
        parsed_at=parsed_at,
    )


def _last_text(body: ChatBody, role: str) -> str:
    """Return what the conversation's last message says if it is of the reply's role."""
    [last] = flatten_messages(body.messages[-1:])
    return last.get("content") or "" if last.get("role") == role else ""


def _is_reasoning_open(text: str, body: ChatBody, assets: ModelAssets) -> bool | None:
    """Say whether the rendered prompt leaves the reply inside of its reasoning, if it says."""
    form = assets.reasoning_format
    if assets.uses_harmony:
        return harmony.is_reasoning_open(text)
    begun = flatten_messages(body.messages[-1:])[0]["content"] if body.continue_final_message else ""
    return is_reasoning_open(text, form, begun) if form else None


def _reply_fields(body: GenerationBody, params: SamplingParams, bounds: Bounds) -> dict[str, Any]:
    options = body.stream_options
    asked = options if options is not None and options.include_usage else None
    return {
        "num_choices": params.n,
        "has_logprobs": params.logprobs is not None,
        "has_prompt_logprobs": body.prompt_logprobs is not None,
        "has_named_logprobs": bool(params.logprob_token_ids),
        "names_token_ids": bool(body.return_tokens_as_token_ids) or bounds.names_token_ids,
        "return_token_ids": bool(body.return_token_ids),
        "has_times": bounds.shows_times,
        "include_usage": bounds.always_has_usage or asked is not None,
        "continuous_usage": bounds.always_has_usage or (asked is not None and asked.continuous_usage_stats),
    }


def _shown(body: GenerationBody) -> dict[str, Any]:
    """Return the fields that a client set, without texts, and none at a length that would fill a log."""
    fields = body.model_dump(exclude=_TEXTS, exclude_unset=True)
    return {name: value if len(str(value)) <= _MAX_SHOWN_CHARS else "..." for name, value in fields.items()}


def _check_count(num_prompts: int, body: GenerationBody, engine: RegionInfo) -> None:
    if num_prompts * max(body.n or 1, 1) > engine.max_sequences:
        raise BadRequestError(f"One request may ask for at most {engine.max_sequences} sequences.", "n")


def text_of(source: str | list[int], assets: ModelAssets) -> str:
    """Return the text of a prompt."""
    return source if isinstance(source, str) else assets.tokenizer.decode(source, skip_special_tokens=False)
