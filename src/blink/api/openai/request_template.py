# SPDX-License-Identifier: Apache-2.0
"""The chat template that a request brings along, where the server lets it (--trust-request-chat-template)."""

from __future__ import annotations

from functools import lru_cache

from blink.api.openai.schema import ConversationBody
from blink.api.serving.parsed_request import Bounds, HeavyRequestError
from blink.errors import BadRequestError, ConfigError
from blink.request.rendering import Rendering
from blink.text.assets import ModelAssets
from blink.text.template import ChatTemplate

_NAME = "chat_template"
_MOST_KEPT = 8  # compiled templates: a client sends the same with each of its requests


def rendering_of(body: ConversationBody, assets: ModelAssets, bounds: Bounds) -> Rendering:
    """Return how a body's messages become a prompt, by the model's template or the body's own.

    Raises:
        BadRequestError: the body's template is malformed, or the server takes none.
        HeavyRequestError: others wait while it is compiled.
    """
    source = body.chat_template
    given = (body.chat_template_kwargs or {}).get(_NAME)
    if source is None and given is None:
        return body.rendering(assets.template_defaults)
    if not bounds.trusts_templates:
        raise BadRequestError(
            "Chat templates in requests are not allowed (--trust-request-chat-template allows them).", _NAME
        )
    if source is None:
        raise BadRequestError("chat_template_kwargs has no chat_template: it is a field of the request.", _NAME)
    if bounds.is_hurried:
        raise HeavyRequestError("A chat template is to be compiled.")
    return body.rendering(assets.template_defaults, _compile(source, tuple(assets.special_tokens.items())))


@lru_cache(_MOST_KEPT)
def _compile(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    try:
        return ChatTemplate(source, dict(special_tokens))
    except ConfigError as error:
        raise BadRequestError(str(error), _NAME) from None
