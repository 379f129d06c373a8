# SPDX-License-Identifier: Apache-2.0
"""From the checked body of a response to what the engine is asked for: that of the chat which it stands for."""

from __future__ import annotations

from dataclasses import replace

from blink.api.openai.read import read_chat
from blink.api.openai.responses.schema import ResponsesBody, naming_origins
from blink.api.openai.responses.write import ResponseReply
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.link.client import RegionInfo
from blink.text.assets import ModelAssets


def read_responses(body: ResponsesBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize the conversation of a response.

    Raises:
        BlinkError: the request is refused.
    """
    with naming_origins():
        chat = read_chat(body.chat, assets, bounds, engine)
    params = chat.params
    reply = ResponseReply(
        message=chat.reply.message, echo=body.echo, temperature=params.temperature, top_p=params.top_p
    )
    return replace(chat, reply=reply)
