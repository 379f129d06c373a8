# SPDX-License-Identifier: Apache-2.0
"""POST /invocations, the one path that SageMaker calls: the body says whether it is a chat or a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Discriminator, Tag

from blink.api.openai.read import read_chat, read_completion
from blink.api.openai.schema import ChatBody, CompletionBody
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.text.assets import ModelAssets

# Fields of bodies for models that embed, score or rank.
_OTHERS = ("input", "text_1", "documents", "query")


def _kind_of(value: object) -> str:
    if not isinstance(value, Mapping):
        return "messages" if isinstance(value, ChatBody) else "prompt"
    if "messages" in value or "prompt" in value:
        return "messages" if "messages" in value else "prompt"
    for name in _OTHERS:
        if name in value:
            raise BadRequestError(f"{name}: this server's models generate text; send messages or prompt.", name)
    return "prompt"


InvocationBody = Annotated[
    Annotated[CompletionBody, Tag("prompt")] | Annotated[ChatBody, Tag("messages")], Discriminator(_kind_of)
]


def read_invocation(
    body: ChatBody | CompletionBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo
) -> ParsedRequest:
    """Read a chat or a completion.

    Raises:
        BlinkError: the request is refused.
    """
    if isinstance(body, ChatBody):
        return read_chat(body, assets, bounds, engine)
    return read_completion(body, assets, bounds, engine)
