# SPDX-License-Identifier: Apache-2.0
"""From the checked body of a message to what the engine is asked for: that of the chat which it stands for.

Raises of both: BlinkError, where the request is refused.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from blink.api.anthropic.errors import naming_origins
from blink.api.anthropic.schema import CountTokensBody, MessagesBody
from blink.api.anthropic.write import MessageReply
from blink.api.openai.read import read_chat
from blink.api.openai.tokens import tokens_of
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.link.client import RegionInfo
from blink.request.reasoning_budget import can_limit_reasoning
from blink.text.assets import ModelAssets


def read_messages(body: MessagesBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize a conversation."""
    if can_limit_reasoning(assets):
        body.chat.thinking_token_budget = body.thinking_budget
    with naming_origins():
        chat = read_chat(body.chat, assets, bounds, engine)
    return replace(chat, reply=MessageReply(message=chat.reply.message, shows_thinking=body.shows_thinking))


def answer_count_tokens(
    body: CountTokensBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Answer with the number of tokens that a conversation has as a prompt."""
    del engine
    with naming_origins():
        tokens = tokens_of(body.chat, assets, bounds)
    return ParsedRequest(model=body.model, answer=orjson.dumps({"input_tokens": len(tokens)}))
