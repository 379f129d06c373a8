# SPDX-License-Identifier: Apache-2.0
"""How the replies to a chat are to be read, and what their output is constrained to."""

from __future__ import annotations

from dataclasses import replace

from blink.api.reading import Read
from blink.api.schema import ChatBody
from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from blink.text.assets import ModelAssets
from blink.text.message.formats import HERMES
from blink.text.message.parser import MessageForm
from blink.text.message.tool_use import ToolUse, constrain


def message_form(read: Read, assets: ModelAssets, *, may_choose: bool) -> MessageForm | None:
    """Return how replies are read, None where their text is their content.

    Raises:
        BadRequestError: the model shall decide about calls, and may not (`may_choose`) or cannot.
    """
    body = read.body
    if not isinstance(body, ChatBody):
        return None
    use, reasoning = body.tool_use, assets.reasoning_format
    if use is None and reasoning is None:
        return None
    if use is not None and use.choice == "auto":
        _check_choice(assets, may_choose)
    return MessageForm(
        reasoning=reasoning,
        is_reasoning_open=read.is_reasoning_open,
        include_reasoning=body.include_reasoning,
        calls=None if use is None else assets.call_format or HERMES,
        names=frozenset() if use is None else use.names,
        parallel=use is None or use.parallel,
        is_named=use is not None and use.choice == "named",
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


def constrain_calls(params: SamplingParams, use: ToolUse | None, form: MessageForm) -> SamplingParams:
    """Return the parameters of a request whose replies are read by `form`: markers are seen, calls keep their schema.

    Raises:
        BadRequestError: calls are to be forced on an output that is constrained otherwise.
    """
    params = replace(params, skip_special_tokens=False)
    if use is None or form.calls is None:
        return params
    tag = constrain(use, form.calls, form.reasoning_end)
    if tag is None:
        return params
    if params.structured_outputs is not None:
        if use.choice == "auto":
            return params
        raise BadRequestError("response_format cannot be combined with a forced tool call.", "tool_choice")
    return replace(params, structured_outputs=StructuredOutputsParams(structural_tag=tag))
