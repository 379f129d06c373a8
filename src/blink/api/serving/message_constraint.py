# SPDX-License-Identifier: Apache-2.0
"""What an output that is read as a message is constrained to: calls, and forms after the reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams
from blink.structured_outputs import Channels, StructuralTag, StructuredOutputsParams
from blink.text.message.format_kinds import CallFormat
from blink.text.message.harmony import MARKS, NAMESPACE
from blink.text.message.parser import MessageForm
from blink.text.message.tool_use import ToolUse, constrain, schemas_of


def constrain_message(params: SamplingParams, use: ToolUse | None, form: MessageForm) -> SamplingParams:
    """Return the parameters of a request whose replies `form` reads: markers are seen, forms hold behind reasoning.

    Raises:
        BadRequestError: calls are to be forced on an output that is constrained otherwise.
    """
    structured = params.structured_outputs
    if form.uses_harmony:
        channels = _harmony_channels(structured, use, form)
        return params.derive(skip_special_tokens=True, token_marks=MARKS, structured_outputs=channels)
    if use is not None and form.calls is not None:
        structured = _with_calls(structured, use, form.calls)
    if structured is not None:
        start, end = form.reasoning_tags
        # What begins with the marker of a call is free before it anyway, and may reason.
        tag = structured.structural_tag
        is_free = isinstance(tag, StructuralTag) and tag.trigger
        if not is_free:
            structured = replace(structured, reasoning_start=start, reasoning_end=end)
    return params.derive(skip_special_tokens=False, structured_outputs=structured)


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


def _harmony_channels(
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
