# SPDX-License-Identifier: Apache-2.0
"""The ways in which models write reasoning, by vLLM's names, and which of them a template speaks."""

from __future__ import annotations

from dataclasses import replace

from blink.text.message.format_kinds import ReasoningFormat, Signs, Space, find_format, find_tag_end

HARMONY_REASONING = ReasoningFormat("", "", uses_harmony=True)
# Such models may call without closing their reasoning; the JSON form of calls stays reasoning.
_TAGGED_CALL = ("<tool_call>\n<function=",)
REASONING_FORMATS = {
    "openai_gptoss": HARMONY_REASONING,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "deepseek_v4": ReasoningFormat("<think>", "</think>", ends=("<｜DSML｜tool_calls>",), space=Space.END_DROPPED),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", space=Space.END_DROPPED),
    "qwen3": ReasoningFormat("<think>", "</think>", ends=_TAGGED_CALL),
    "nemotron_v3": ReasoningFormat(
        "<think>", "</think>", begins_inside=True, ends=_TAGGED_CALL, space=Space.END_DROPPED
    ),
    "step3p5": ReasoningFormat("<think>", "</think>", begins_inside=True, ends=_TAGGED_CALL, space=Space.END_DROPPED),
    "granite_thinking_parser": ReasoningFormat(
        "<think>", "</think>", begins_inside=True, ends=_TAGGED_CALL, space=Space.DROPPED
    ),
    "glm45": ReasoningFormat("<think>", "</think>", ends=("<tool_call>",), space=Space.END_DROPPED),
    "kimi_k2": ReasoningFormat("<think>", "</think>", ends=("<|tool_calls_section_begin|>",), space=Space.END_DROPPED),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        begins_inside=True,
        answer_tags=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    # The effort that a request asks for chooses the pair of tags.
    "k2_horizon": ReasoningFormat(
        "<ifm|think>",
        "</ifm|think>",
        begins_inside=True,
        other_opens=("<ifm|think_fast>", "<ifm|think_faster>"),
        other_closes=("</ifm|think_fast>", "</ifm|think_faster>"),
        ends=("<ifm|tool_calls>",),
    ),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "hy_v4": ReasoningFormat("<think>", "</think>"),
    "inkling": ReasoningFormat(
        "<|content_thinking|>",
        "<|end_message|>",
        other_opens=("<|message_model|><|content_thinking|>",),
        ends=("<|content_invoke_tool_json|>",),
        answer_tags=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
        reopens=True,
    ),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", begins_inside=True),
    # The channel is named after its opening tag; a name other than this one is reasoning.
    "gemma4": ReasoningFormat(
        "<|channel>thought\n", "<channel|>", other_opens=("<|channel>",), reopens=True, space=Space.END_DROPPED
    ),
    "plamo3": ReasoningFormat(
        "<|plamo:begin_think:plamo|>",
        "<|plamo:end_think:plamo|>",
        ends=("<|plamo:begin_tool_requests:plamo|>",),
        reopens=True,
    ),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        other_opens=("Here's my thought process:",),
        other_closes=("Here's my response:",),
    ),
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", answer_tags=("<answer>", "</answer>"), space=Space.DROPPED),
    "ernie45": ReasoningFormat(
        "<think>", "</think>", begins_inside=True, answer_tags=("<response>", "</response>"), space=Space.DROPPED
    ),
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "minimax_m2_append_think": ReasoningFormat("<think>", "</think>", begins_inside=True, is_content=True),
}
# The first is chosen of which the template has all signs.
_SIGNS: Signs = (
    ("seed_oss", ("<seed:think>",)),
    ("minimax_m3", ("<mm:think>",)),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("plamo3", ("<|plamo:begin_think:plamo|>",)),
    ("k2_horizon", ("<ifm|think",)),
    ("kimi_k3", ("<|open|>think<|sep|>",)),
    ("inkling", ("<|content_thinking|>",)),
    ("hy_v4", ("<think:", "</think:")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("deepseek_v4", ("｜DSML｜tool_calls", "<think>")),
    ("glm45", ("<arg_key>", "<think>")),
    ("hunyuan_a13b", ("<answer>", "<think>")),
    ("ernie45", ("<response>", "<think>")),
    ("qwen3", ("<think>",)),
    ("qwen3", ("</think>",)),
)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of reasoning that a chat template speaks, None for none that is known.

    It begins with its opening tag, of the prompt or of the reply.
    """
    name = find_format(template, _SIGNS)
    return replace(fit_reasoning_format(REASONING_FORMATS[name], template), begins_inside=False) if name else None


def fit_reasoning_format(form: ReasoningFormat, template: str) -> ReasoningFormat:
    """Return a format as the models of a chat template write it, where those of one format differ."""
    if form is not REASONING_FORMATS["hy_v4"]:
        return form
    end = find_tag_end(template)
    return replace(form, open=f"<think{end}>", close=f"</think{end}>")
