# SPDX-License-Identifier: Apache-2.0
"""From the checked body of a response to what the engine is asked for: that of the chat which it stands for.

Raises of both: BlinkError, where the request is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import orjson

from blink.api.openai.read import read_chat
from blink.api.openai.responses.schema import InputTokensBody, ResponsesBody, naming_origins
from blink.api.openai.responses.write import ResponseReply
from blink.api.openai.tokens import tokens_of
from blink.api.serving.parsed_request import Bounds, HeavyRequestError, ParsedRequest
from blink.api.serving.response_store import find_kept
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.text.assets import ModelAssets

_ID_BYTES = 16
_LIGHT_BYTES = 16 << 10  # of a stored conversation, and of the answer to it
_STORELESS = "This server stores no responses (--response-store-size 0)."


def read_responses(body: ResponsesBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize the conversation of a response."""
    _go_on(body, bounds)
    if body.background and bounds.store is None:
        raise BadRequestError(f"background is not available: {_STORELESS}", "background")
    with naming_origins():
        chat = read_chat(body.chat, assets, bounds, engine)
    params = chat.params
    is_kept = bounds.store is not None and body.store is not False
    reply = ResponseReply(
        message=chat.reply.message,
        echo=body.echo,
        temperature=params.temperature,
        top_p=params.top_p,
        has_logprobs=params.logprobs is not None,
        shows_messages=body.enable_response_messages,
        origins=body.origins,
    )
    kept_input = orjson.dumps([_named(item) for item in body.items]) if is_kept else None
    return replace(chat, reply=reply, kept_input=kept_input, runs_behind=bool(body.background))


def answer_input_tokens(
    body: InputTokensBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Answer with the number of tokens that a response's conversation has as a prompt."""
    del engine
    _go_on(body, bounds)
    with naming_origins():
        tokens = tokens_of(body.chat, assets, bounds)
    answer = {"object": "response.input_tokens", "input_tokens": len(tokens)}
    return ParsedRequest(model=body.model, answer=orjson.dumps(answer))


def _go_on(body: ResponsesBody, bounds: Bounds) -> None:
    """Put what a stored response has answered, and its answer, before the request's own input."""
    name = body.previous_response_id
    if name is None:
        return
    if bounds.store is None:
        raise BadRequestError(f"previous_response_id is not available: {_STORELESS}", "previous_response_id")
    kept = find_kept(bounds.store, bounds.owner, name, "previous_response_id")
    if kept.status not in ("completed", "incomplete"):
        raise BadRequestError(f"The response before is {kept.status}: nothing can follow it.", "previous_response_id")
    if bounds.is_hurried and len(kept.input) + len(kept.response) > _LIGHT_BYTES:
        raise HeavyRequestError("A long conversation is stored.")
    body.go_on_behind([*orjson.loads(kept.input), *orjson.loads(kept.response)["output"]])


def _named(item: dict[str, object]) -> dict[str, object]:
    """Return an item with an id, by which a list of items is read on."""
    return item if isinstance(item.get("id"), str) else {**item, "id": f"item_{secrets.token_hex(_ID_BYTES)}"}
