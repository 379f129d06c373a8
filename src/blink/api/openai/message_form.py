# SPDX-License-Identifier: Apache-2.0
"""How the replies to a chat are to be read."""

from __future__ import annotations

from dataclasses import replace

from blink.api.openai.schema import ChatBody
from blink.errors import BadRequestError
from blink.text.assets import ModelAssets
from blink.text.message.formats import HERMES
from blink.text.message.parser import MessageForm
from blink.text.message.reasoning import as_prompted
from blink.text.message.tool_use import schemas_of


def message_form(
    body: ChatBody,
    assets: ModelAssets,
    *,
    may_choose: bool,
    prompt: str = "",
    is_reasoning_open: bool | None = None,
    is_answer: bool = False,
    needs_content: bool = False,
) -> MessageForm | None:
    """Return how replies are read, None where their text is their content.

    Args:
        may_choose: the model may decide whether it calls tools.
        prompt: its text, which may choose between pairs of tags.
        is_reasoning_open: as the prompt leaves it, if it says.
        is_answer: the reply does not reason unless it writes the opening tag.
        needs_content: the request asks for content where the reply has none.
    Raises:
        BadRequestError: the model shall decide about calls, and may not or cannot.
    """
    use, reasoning = body.tool_use, assets.reasoning_format
    if use is None and reasoning is None and not assets.uses_harmony:
        return None
    if use is not None and use.choice == "auto":
        _check_choice(assets, may_choose)
    if reasoning is not None:
        reasoning = as_prompted(reasoning, prompt)
    if reasoning is not None and is_answer:
        reasoning = replace(reasoning, begins_inside=False)
    if reasoning is not None and (use is None or use.choice != "auto"):
        reasoning = replace(reasoning, ends=())  # the constraint of a forced call begins behind the closing tag
    return MessageForm(
        reasoning=reasoning,
        is_reasoning_open=is_reasoning_open,
        include_reasoning=body.include_reasoning,
        calls=None if use is None else assets.call_format or HERMES,
        names=frozenset() if use is None else use.names,
        schemas={} if use is None else schemas_of(use),
        parallel=use is None or use.parallel,
        num_earlier_calls=sum(len(message.get("tool_calls") or ()) for message in body.messages) if use else 0,
        is_named=use is not None and use.choice == "named",
        uses_harmony=assets.uses_harmony,
        needs_content=needs_content,
    )


def _check_choice(assets: ModelAssets, may_choose: bool) -> None:
    if not may_choose:
        raise BadRequestError(
            'The tool choice "auto" is switched off (--no-enable-auto-tool-choice); set tool_choice to "required",'
            ' a function or "none".',
            "tool_choice",
        )
    if assets.call_format is None:
        raise BadRequestError(
            "How this model writes tool calls is not known: start the server with --tool-call-parser,"
            ' or set tool_choice to "required", a function or "none".',
            "tools",
        )
