# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions/render and /v1/completions/render: a request's prompt as tokens, and nothing is generated.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

import orjson

from blink.api.openai.read import read_chat, read_completion
from blink.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.request.planner import fit_max_tokens
from blink.sampling_params import PLANNED_FIELDS, SamplingParams
from blink.text.assets import ModelAssets
from blink.text.prompt import Prompt, prepare_prompts_now


def answer_render_chat(body: ChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Answer with the tokens of a conversation and the parameters by which its answer would be sampled."""
    [rendered] = _render(body, read_chat(body, assets, bounds, engine), "chatcmpl", assets, engine)
    return ParsedRequest(model=body.model, answer=orjson.dumps(rendered, option=orjson.OPT_NON_STR_KEYS))


def answer_render_completion(
    body: CompletionBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Answer with the same of each prompt of a completion."""
    rendered = _render(body, read_completion(body, assets, bounds, engine), "cmpl", assets, engine)
    return ParsedRequest(model=body.model, answer=orjson.dumps(rendered, option=orjson.OPT_NON_STR_KEYS))


def _render(
    body: GenerationBody, parsed: ParsedRequest, prefix: str, assets: ModelAssets, engine: RegionInfo
) -> list[dict[str, Any]]:
    if parsed.search is not None:
        raise BadRequestError("A beam search cannot be rendered.", "use_beam_search")
    limit = parsed.params.max_tokens
    prompts = prepare_prompts_now(parsed.prompts, parsed.rules, assets.tokenizer, engine, limit)
    request_id = f"{prefix}-{body.request_id or secrets.token_hex(16)}"
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{place}" for place in range(len(prompts))]
    return [_rendered(body, parsed.params, *each, engine) for each in zip(ids, prompts, strict=True)]


def _rendered(
    body: GenerationBody, params: SamplingParams, request_id: str, prompt: Prompt, engine: RegionInfo
) -> dict[str, Any]:
    """Return what vLLM's /inference/v1/generate takes."""
    fitted = fit_max_tokens(params, prompt, engine.max_model_len)
    return {
        "request_id": request_id,
        "token_ids": prompt.tokens.tolist(),
        "sampling_params": {name: value for name, value in asdict(fitted).items() if name not in PLANNED_FIELDS},
        "model": body.model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options.model_dump() if body.stream_options is not None else None,
        "return_token_ids": body.return_token_ids,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "features": None,
    }
