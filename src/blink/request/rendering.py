# SPDX-License-Identifier: Apache-2.0
"""From messages to the text of a prompt, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blink.errors import BadRequestError
from blink.text.assets import ModelAssets
from blink.text.conversation import flatten_messages
from blink.text.fitting import fit_messages
from blink.text.harmony_prompt import arrange_messages, check_effort, describe_tools, spell
from blink.text.template import ChatTemplate
from blink.text.template_traits import TemplateTraits
from blink.text.tool_prompt import put_tools_in_message, tell_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt; `variables` go to the chat template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: ChatTemplate | None = None  # None: the model's
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


def render_messages(messages: Sequence[Mapping[str, Any]], rendering: Rendering, assets: ModelAssets) -> str:
    """Return the prompt text of a conversation, for Tokenizer.encode().

    Raises:
        BadRequestError: the model has no chat template, or it or a message does not fit.
    """
    if not messages:
        raise BadRequestError("messages must not be empty.", "messages")
    if rendering.continue_final_message and rendering.add_generation_prompt:
        raise BadRequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        )
    tools = rendering.variables.get("tools") or ()
    template = rendering.template or assets.template_for(tools)
    if template is None:
        raise BadRequestError(
            "The model has no chat template; send a prompt, or start with --chat-template.", "messages"
        )
    try:
        arranged, variables = _arrange(messages, tools, rendering.variables, template.traits, assets)
        return template.render(
            arranged,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
            variables=variables,
        )
    except RecursionError:
        raise BadRequestError("The messages are nested too deeply.", "messages") from None


def _arrange(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    traits: TemplateTraits,
    assets: ModelAssets,
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the messages and variables as the template takes them."""
    flat: Sequence[Mapping[str, Any]] = flatten_messages(messages, text_arguments=traits.text_arguments)
    if assets.uses_harmony:
        check_effort(variables.get("reasoning_effort", "medium"))
        letters = assets.tokenizer.spell
        flat = spell(arrange_messages(flat), letters)
        variables = {**variables, "tools": spell(describe_tools(tools), letters) or None}
    if traits.tools_place == "none":
        flat = tell_tools(flat, tools)
    elif traits.tools_place == "message" and tools:
        flat = put_tools_in_message(flat, tools)
    return fit_messages(flat, traits), variables
