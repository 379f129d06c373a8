# SPDX-License-Identifier: Apache-2.0
"""How LLM's chats become prompts: the options of vLLM's chat(), and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from blink.errors import BadRequestError
from blink.offline.local_engine import refuse, rules_of
from blink.offline.public_tokenizer import template_of
from blink.request.rendering import Rendering, render_messages
from blink.request.source import Source
from blink.text.assets import ModelAssets
from blink.text.prompt import PromptRules

Message = Mapping[str, Any]  # JSON: roles, contents and whatever else the template reads


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a call of chat() or enqueue_chat() says beside its messages, in vLLM's order.

    Raises:
        BadRequestError: an option asks for what is not done here.
    """

    lora_request: object = None
    priority: int | Sequence[int] | None = None
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tokenization_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: object = None

    def __post_init__(self) -> None:
        refuse(mm_processor_kwargs=self.mm_processor_kwargs)
        name = "chat_template_content_format"
        if self.chat_template_content_format not in ("auto", "string", "openai"):
            raise BadRequestError(f"{name} must be auto, string or openai.", name)

    @property
    def rules(self) -> PromptRules:
        """Return how the conversations' texts are treated."""
        return rules_of("messages", add_special_tokens=False, given=self.tokenization_kwargs)

    def sources(self, messages: Sequence[Message] | Sequence[Sequence[Message]], assets: ModelAssets) -> list[Source]:
        """Return the prompts of one conversation, or of a list of them.

        Raises:
            BadRequestError: the model has no chat template, or it refuses the messages.
            ConfigError: the call's template is malformed.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_one else messages)
        rendering = Rendering(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template=template_of(self.chat_template, assets),
            variables={**assets.template_defaults, **(self.chat_template_kwargs or {}), "tools": self.tools},
        )
        return [Source(render_messages(conversation, rendering, assets)) for conversation in conversations]
