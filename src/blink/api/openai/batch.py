# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions/batch: several conversations in one request, a choice of the answer for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from blink.api.openai.choices import ChoicesReply
from blink.api.openai.read import read_chat
from blink.api.openai.schema import ChatBody, Message
from blink.api.serving.body import Body
from blink.api.serving.parsed_request import Bounds, HeavyRequestError, ParsedRequest
from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.sampling_params import MAX_CHOICES
from blink.text.assets import ModelAssets

# What belongs to one conversation, or to a stream. A value that asks for nothing is no wish.
_NOT_HERE = ("stream", "tools", "functions", "use_beam_search", "prompt_logprobs", "kv_transfer_params")
_MOST_HURRIED = 8  # conversations: more take milliseconds
_Conversation = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class BatchChatBody(Body):
    """POST /v1/chat/completions/batch: the fields of a chat, and `messages` is a list of conversations."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[_Conversation], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    _chats: list[ChatBody] = PrivateAttr(default_factory=list[ChatBody])

    @model_validator(mode="after")
    def _read_chats(self) -> BatchChatBody:
        fields = self.model_extra or {}
        for name in _NOT_HERE:
            if fields.get(name) not in (None, False, []):
                raise BadRequestError(f"{name} is not for several conversations in one request.", name)
        if fields.get("n") not in (None, 1):
            raise BadRequestError("n must be 1 for several conversations in one request.", "n")
        self._chats = [ChatBody.model_validate(self._chat_fields(messages)) for messages in self.messages]
        return self

    @property
    def chats(self) -> list[ChatBody]:
        """Return each conversation as a chat of its own."""
        return self._chats

    def _chat_fields(self, messages: list[Message]) -> dict[str, Any]:
        return {**(self.model_extra or {}), "model": self.model, "messages": messages}


def read_batch(body: BatchChatBody, assets: ModelAssets, bounds: Bounds, engine: RegionInfo) -> ParsedRequest:
    """Render and tokenize each conversation.

    Raises:
        BlinkError: one is refused.
        HeavyRequestError: others wait while many are rendered.
    """
    if bounds.is_hurried and len(body.chats) > _MOST_HURRIED:
        raise HeavyRequestError("Many conversations are to be rendered.")
    chats = [read_chat(chat, assets, bounds, engine) for chat in body.chats]
    replies = [chat.reply for chat in chats if isinstance(chat.reply, ChoicesReply)]
    first, *others = replies
    if any((other.role, other.message) != (first.role, first.message) for other in others):
        raise BadRequestError(
            "The conversations' answers have different roles, or only some begin inside of reasoning: send each in a"
            " request of its own.",
            "messages",
        )
    echoes = [echo for reply in replies for echo in reply.echoes]
    prompts = [prompt for chat in chats for prompt in chat.prompts]
    return replace(chats[0], model=body.model, prompts=prompts, reply=replace(first, echoes=echoes))
