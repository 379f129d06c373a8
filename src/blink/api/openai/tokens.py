# SPDX-License-Identifier: Apache-2.0
"""The answers of /tokenize and /detokenize.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

import orjson

from blink.api.openai.request_template import rendering_of
from blink.api.openai.schema import ConversationBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.request.rendering import render_messages
from blink.text.assets import ModelAssets
from blink.text.prompt import check_vocabulary

_CHARS_PER_TOKEN = 4  # of the tokens that /detokenize takes, as a share of the characters that /tokenize takes


def answer_tokenize(
    body: TokenizeTextBody | TokenizeChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Answer with the tokens of a text or a conversation."""
    tokens = tokens_of(body, assets, bounds)
    tokenizer = assets.tokenizer
    answer = {
        "count": len(tokens),
        "max_model_len": engine.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None,
    }
    return ParsedRequest(model=body.model, answer=orjson.dumps(answer))


def tokens_of(body: TokenizeTextBody | ConversationBody, assets: ModelAssets, bounds: Bounds) -> list[int]:
    """Return the tokens of a text or a conversation."""
    is_text = isinstance(body, TokenizeTextBody)
    text = body.prompt if is_text else render_messages(body.messages, rendering_of(body, assets, bounds), assets)
    if len(text) > bounds.max_tokenize_chars:
        raise BadRequestError(
            f"The text has {len(text)} characters; this server tokenizes at most {bounds.max_tokenize_chars}.",
            "prompt" if is_text else "messages",
        )
    return assets.tokenizer.encode(text, add_special_tokens=body.add_special_tokens) if text else []


def answer_detokenize(body: DetokenizeBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Answer with the text of token ids."""
    limit = max(bounds.max_tokenize_chars // _CHARS_PER_TOKEN, 1)
    if len(body.tokens) > limit:
        raise BadRequestError(f"This server detokenizes at most {limit} token ids, got {len(body.tokens)}.", "tokens")
    check_vocabulary(body.tokens, engine.vocab_size, "tokens")
    text = assets.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return ParsedRequest(model=body.model, answer=orjson.dumps({"prompt": text}))
