# SPDX-License-Identifier: Apache-2.0
"""From a conversation of blocks to the messages of a chat. Neighbours of one role are one turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from blink.api.anthropic.blocks import (
    Block,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from blink.errors import BadRequestError

Message = dict[str, Any]

# What Claude Code puts before its instructions: another one for each request, which no prefix cache survives.
_BILLING = "x-anthropic-billing-header"
_ALLOWED: dict[str, tuple[type[Any], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def chat_messages(system: Sequence[TextBlock], turns: Sequence[Turn]) -> list[Message]:
    """Return the messages of a chat.

    Raises:
        BadRequestError: a block stands in a message of a role that has none of its type.
    """
    _check_roles(turns)
    instructions = [block for block in system if not block.text.startswith(_BILLING)]
    messages = [{"role": "system", "content": _join(instructions)}] if instructions else []
    for role, neighbours in groupby(turns, lambda turn: turn.role):
        blocks = [block for turn in neighbours for block in turn.content]
        if role == "assistant":
            messages.append(_answer_of(blocks))
        else:
            messages += _messages_of(role, blocks)
    return messages


def _check_roles(turns: Sequence[Turn]) -> None:
    for index, turn in enumerate(turns):
        for place, block in enumerate(turn.content):
            if not isinstance(block, _ALLOWED[turn.role]):
                raise BadRequestError(
                    f"messages.{index}.content.{place}: a message of role {turn.role!r} has no blocks of type"
                    f" {block.type!r}.",
                    "messages",
                )


def _join(blocks: Sequence[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _answer_of(blocks: Sequence[Block]) -> Message:
    message: Message = {"role": "assistant", "content": _join(blocks)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [_call_of(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = calls
    return message


def _call_of(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _messages_of(role: str, blocks: Sequence[Block]) -> list[Message]:
    """Return a turn's texts, and the results between them, which a chat has as messages of their own."""
    messages: list[Message] = []
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            messages += [_result_of(block) for block in group if isinstance(block, ToolResultBlock)]
        else:
            messages.append({"role": role, "content": _join(list(group))})
    return messages or [{"role": role, "content": ""}]


def _result_of(block: ToolResultBlock) -> Message:
    text = _join(block.content or ())
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}
