# SPDX-License-Identifier: Apache-2.0
"""What each endpoint makes of its checked body: tokens for the engine, or the answer itself.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

import time
from dataclasses import replace

import orjson

from blink.api.openai.responses.schema import ResponsesBody, naming_origins
from blink.api.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from blink.api.serving.read import Bounds, Read
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.request.planner import Planner
from blink.text.assets import ModelAssets
from blink.text.conversation import flatten_messages
from blink.text.message import harmony
from blink.text.message.reasoning import is_reasoning_open, is_switched_off
from blink.text.prompt import check_vocabulary, read_tokens

_CHARS_PER_TOKEN = 4  # of the tokens that /detokenize takes, as a share of the characters that /tokenize takes


def read_completion(body: CompletionBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    """Tokenize the prompts of a completion."""
    parsed, sources = time.perf_counter(), body.prompts
    _check_count(len(sources), body, engine)
    prompts = [read_tokens(source, body.prompt_rules, assets.tokenizer, engine) for source in sources]
    echoes = [_text_of(source, assets) for source in sources] if body.echo else []
    del bounds
    return Read("completions", body, prompts, echoes, parsed=parsed)


def read_chat(body: ChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    """Render and tokenize a conversation."""
    del bounds
    parsed = time.perf_counter()
    text = Planner(assets).render(body.messages, body.rendering)
    _check_count(1, body, engine)
    role = body.messages[-1].get("role", "assistant")
    form = assets.reasoning_format
    if assets.in_channels:
        is_open = harmony.is_reasoning_open(text)
    else:
        begun = flatten_messages(body.messages[-1:])[0]["content"] if body.continue_final_message else ""
        is_open = is_reasoning_open(text, form, begun) if form else None
    is_answer = body.continue_final_message or is_switched_off(body.rendering.variables)
    tokens = read_tokens(text, body.prompt_rules, assets.tokenizer, engine)
    return Read("chat", body, [tokens], role=role, is_reasoning_open=is_open, is_answer=is_answer, parsed=parsed)


def read_responses(body: ResponsesBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    """Render and tokenize the conversation of a response."""
    with naming_origins():
        return replace(read_chat(body.chat, assets, bounds, engine), kind="responses", echo=body.echo)


def _check_count(num_prompts: int, body: GenerationBody, engine: RegionInfo) -> None:
    if num_prompts * max(body.n or 1, 1) > engine.max_sequences:
        raise BadRequestError(f"One request may ask for at most {engine.max_sequences} sequences.", "n")


def _text_of(source: str | list[int], assets: ModelAssets) -> str:
    return source if isinstance(source, str) else assets.tokenizer.decode(source, skip_special_tokens=False)


def answer_tokenize(
    body: TokenizeTextBody | TokenizeChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> Read:
    """Answer with the tokens of a text or a conversation."""
    is_text = isinstance(body, TokenizeTextBody)
    text = body.prompt if is_text else Planner(assets).render(body.messages, body.rendering)
    if len(text) > bounds.max_tokenize_chars:
        raise BadRequestError(
            f"The text has {len(text)} characters; this server tokenizes at most {bounds.max_tokenize_chars}.",
            "prompt" if is_text else "messages",
        )
    tokenizer = assets.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=body.add_special_tokens) if text else []
    answer = {
        "count": len(tokens),
        "max_model_len": engine.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None,
    }
    return Read("tokenize", body, answer=orjson.dumps(answer))


def answer_detokenize(body: DetokenizeBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> Read:
    """Answer with the text of token ids."""
    limit = max(bounds.max_tokenize_chars // _CHARS_PER_TOKEN, 1)
    if len(body.tokens) > limit:
        raise BadRequestError(f"This server detokenizes at most {limit} token ids, got {len(body.tokens)}.", "tokens")
    check_vocabulary(body.tokens, engine.vocab_size, "tokens")
    text = assets.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Read("detokenize", body, answer=orjson.dumps({"prompt": text}))
