# SPDX-License-Identifier: Apache-2.0
"""The blocks that a conversation's messages consist of. As in Anthropic's API, a field that none knows is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class _Block(BaseModel):
    """Base of all blocks. cache_control: every prefix is cached, so there is nothing to mark."""

    model_config = ConfigDict(extra="forbid")

    cache_control: Any = None


class TextBlock(_Block):
    """Text of anyone."""

    type: Literal["text"]
    text: str
    citations: Any = None  # of an earlier answer


class ThinkingBlock(_Block):
    """Reasoning of an earlier answer; its signature says nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Reasoning that another server has encrypted: nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: Any = None


class ToolUseBlock(_Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_as_blocks)]


class ToolResultBlock(_Block):
    """What a tool has answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    toolset_name: Any = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True), BeforeValidator(_as_blocks)]
