# SPDX-License-Identifier: Apache-2.0
"""How the replies to a chat are to be read, and what their output is constrained to."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from blink.api.openai.schema import ChatBody
from blink.api.serving.read import Read
from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams
from blink.structured_outputs import Channels, StructuredOutputsParams
from blink.text.assets import ModelAssets
from blink.text.message.formats import HERMES, CallFormat
from blink.text.message.harmony import MARKS, NAMESPACE
from blink.text.message.parser import MessageForm
from blink.text.message.tool_use import ToolUse, constrain, schemas_of


def message_form(read: Read, assets: ModelAssets, *, may_choose: bool) -> MessageForm | None:
    """Return how replies are read, None where their text is their content.

    Raises:
        BadRequestError: the model shall decide about calls, and may not (`may_choose`) or cannot.
    """
    body = read.body
    if not isinstance(body, ChatBody):
        return None
    use, reasoning = body.tool_use, assets.reasoning_format
    if use is None and reasoning is None and not assets.in_channels:
        return None
    if use is not None and use.choice == "auto":
        _check_choice(assets, may_choose)
    if reasoning is not None and read.is_answer:
        reasoning = replace(reasoning, begins_inside=False)
    return MessageForm(
        reasoning=reasoning,
        is_reasoning_open=read.is_reasoning_open,
        include_reasoning=body.include_reasoning,
        calls=None if use is None else assets.call_format or HERMES,
        names=frozenset() if use is None else use.names,
        parallel=use is None or use.parallel,
        is_named=use is not None and use.choice == "named",
        in_channels=assets.in_channels,
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


def constrain_message(params: SamplingParams, use: ToolUse | None, form: MessageForm) -> SamplingParams:
    """Return the parameters of a request whose replies `form` reads: markers are seen, forms hold behind reasoning.

    Raises:
        BadRequestError: calls are to be forced on an output that is constrained otherwise.
    """
    structured = params.structured_outputs
    if form.in_channels:
        channels = _in_channels(structured, use, form)
        return replace(params, skip_special_tokens=True, token_marks=MARKS, structured_outputs=channels)
    if use is not None and form.calls is not None:
        structured = _with_calls(structured, use, form.calls)
    if structured is not None:
        start, end = form.reasoning_tags
        # What begins with the marker of a call is free before it anyway, and may reason.
        is_free = structured.structural_tag is not None and structured.structural_tag.trigger
        if not is_free:
            structured = replace(structured, reasoning_start=start, reasoning_end=end)
    return replace(params, skip_special_tokens=False, structured_outputs=structured)


def _with_calls(
    structured: StructuredOutputsParams | None, use: ToolUse, form: CallFormat
) -> StructuredOutputsParams | None:
    if structured is None:
        tag = constrain(use, form)
        return None if tag is None else StructuredOutputsParams(structural_tag=tag)
    _check_forms(use)
    if structured.json is None and not structured.json_object:
        return structured
    return replace(structured, calls=constrain(replace(use, choice="required"), form))


def _check_forms(use: ToolUse) -> None:
    if use.choice != "auto":
        raise BadRequestError("A forced tool call cannot be combined with another form of the output.", "tool_choice")


def _in_channels(
    structured: StructuredOutputsParams | None, use: ToolUse | None, form: MessageForm
) -> StructuredOutputsParams | None:
    if structured is None and use is None:
        return None
    begins_in: Literal["", "analysis", "final"] = ""
    if form.is_reasoning_open is not None:
        begins_in = "analysis" if form.is_reasoning_open else "final"
    calls = {} if use is None else {NAMESPACE + name: schema for name, schema in schemas_of(use).items()}
    channels = Channels(calls=calls, may_answer=use is None or use.choice == "auto", begins_in=begins_in)
    if structured is None:
        return StructuredOutputsParams(channels=channels)
    if use is not None:
        _check_forms(use)
    return replace(structured, channels=channels)
