# SPDX-License-Identifier: Apache-2.0
"""From the checked bodies of Ollama's API to what the engine is asked for: chats and completions.

Raises of all: BlinkError, where the request is refused.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from blink.api.ollama.errors import naming_origins
from blink.api.ollama.model_card import describe_fully, rfc3339
from blink.api.ollama.schema import GenerateBody, GenerationBody, OllamaChatBody, ShowBody
from blink.api.ollama.write import AnswerForm, OllamaReply
from blink.api.openai.read import read_chat, read_completion
from blink.api.openai.schema import ChatBody
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.link.client import RegionInfo
from blink.text.assets import ModelAssets


def read_ollama_chat(body: OllamaChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize a conversation."""
    return _read(body, "message", assets, bounds, engine)


def read_generate(body: GenerateBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize a prompt."""
    return _read(body, "response", assets, bounds, engine)


def answer_show(body: ShowBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Answer with what is known of the model."""
    name = body.model or next(iter(bounds.model_names), "")
    return ParsedRequest(model=body.model, answer=orjson.dumps(describe_fully(name, assets, engine)))


def _read(
    body: GenerationBody, form: AnswerForm, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    asked = body.asked
    if asked is None:
        return ParsedRequest(model=body.model, answer=_loaded(body, form, bounds))
    with naming_origins():
        if isinstance(asked, ChatBody):
            parsed = read_chat(asked, assets, bounds, engine)
        else:
            parsed = read_completion(asked, assets, bounds, engine)
    message = parsed.reply.message.without_space() if parsed.reply.message else None
    reply = OllamaReply(message=message, form=form, has_logprobs=parsed.params.logprobs is not None)
    return replace(parsed, model=body.model, reply=reply)


def _loaded(body: GenerationBody, form: AnswerForm, bounds: Bounds) -> bytes:
    """Return the answer to a request without a text, by which a client loads or unloads a model: it stays loaded."""
    text = "" if form == "response" else {"role": "assistant", "content": ""}
    told = {"model": body.model or next(iter(bounds.model_names), ""), "created_at": rfc3339(), form: text}
    return orjson.dumps({**told, "done": True, "done_reason": "unload" if body.keep_alive == 0 else "load"})
