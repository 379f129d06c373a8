# SPDX-License-Identifier: Apache-2.0
"""From the checked bodies of llama.cpp's API to what the engine is asked for: a completion.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from blink.api.llama_cpp.errors import naming_origins
from blink.api.llama_cpp.schema import ApplyTemplateBody, InfillBody, LlamaCppCompletionBody
from blink.api.llama_cpp.write import LlamaCppReply
from blink.api.openai.read import read_completion, text_of
from blink.api.openai.request_template import rendering_of
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.link.client import RegionInfo
from blink.request.rendering import render_messages
from blink.text.assets import ModelAssets


def read_llama_cpp_completion(
    body: LlamaCppCompletionBody | InfillBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Tokenize a prompt, or the texts around what is missing."""
    asked = body.asked
    with naming_origins():
        parsed = read_completion(asked, assets, bounds, engine)
    reply = LlamaCppReply(
        prompt=text_of(asked.prompts[0], assets),
        params=parsed.params,
        has_tokens=bool(body.return_tokens),
        has_timings=bool(body.timings_per_token),
        fields=tuple(body.response_fields or ()),
    )
    return replace(parsed, reply=reply)


def answer_apply_template(
    body: ApplyTemplateBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Answer with the text of a conversation as a prompt."""
    del engine
    text = render_messages(body.messages, rendering_of(body, assets, bounds), assets)
    return ParsedRequest(model=body.model, answer=orjson.dumps({"prompt": text}))
