# SPDX-License-Identifier: Apache-2.0
"""Calls whose arguments are a JSON object, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blink.text.message.format_kinds import CallFormat


def _tagged(open_tag: str, close_tag: str) -> CallFormat:
    """Return calls with a tag around each object."""
    return CallFormat(
        opens=(open_tag,),
        closes=(close_tag,),
        trigger=open_tag,
        begin=open_tag + '\n{"name": "%s", "arguments": ',
        end="}\n" + close_tag,
        separator="\n",
    )


_MISTRAL = CallFormat(
    opens=("[TOOL_CALLS]",),
    heads=("%s~&{", "%s~[ARGS]~&{", "%s~[CALL_ID]%i~&{", "%s~[CALL_ID]%i~[ARGS]~&{"),
    id_chars=9,
    trigger="[TOOL_CALLS]",
    prefix="[TOOL_CALLS] [",
    suffix="]",
)
# Of models since Mistral Small 3.2, whose templates show it so; all forms are read.
MISTRAL_NAMED = replace(_MISTRAL, prefix="", begin="[TOOL_CALLS]%s[ARGS]", end="", separator="", suffix="")
_DEEPSEEK: Mapping[str, Any] = {
    "opens": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "between": ("<｜tool▁call▁end｜>", "```"),
    "closes": ("<｜tool▁calls▁end｜>",),
    "heads": ("%s~<｜tool▁sep｜>~&{", "function<｜tool▁sep｜>%s~```json~&{"),
    "trigger": "<｜tool▁calls▁begin｜>",
    "prefix": "<｜tool▁calls▁begin｜>",
    "suffix": "<｜tool▁calls▁end｜>",
}
_INKLING_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_PLAMO = "<|plamo:%s:plamo|>"
_PLAMO_NAME = _PLAMO % "begin_tool_name"
_PLAMO_ARGUMENTS = f"{_PLAMO % 'end_tool_name'}{_PLAMO % 'begin_tool_arguments'}<|plamo:constrain|>json<|plamo:msg|>"
HERMES = _tagged("<tool_call>", "</tool_call>")
JAMBA = CallFormat(
    opens=("<tool_calls>",),
    closes=("</tool_calls>",),
    trigger="<tool_calls>",
    prefix="<tool_calls>[",
    suffix="]</tool_calls>",
)
JSON_FORMATS = {
    "hermes": HERMES,
    "granite4": replace(HERMES, keeps_space=True),
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "llama3_json": CallFormat(
        opens=("<|python_tag|>", "<|python_start|>"),
        closes=("<|python_end|>",),
        bare_starts="{[",
        unmarked=('{"name": "',),
        trigger='{"name": "',
        begin='{"name": "%s", "parameters": ',
        separator="; ",
    ),
    "mistral": _MISTRAL,
    "granite": CallFormat(
        opens=("<|tool_call|>", "<tool_call>"),
        trigger="<|tool_call|>",
        prefix="<|tool_call|>[",
        suffix="]",
    ),
    "phi4_mini_json": CallFormat(
        opens=("functools[", "<|tool_call|>"),
        closes=("<|/tool_call|>",),
        trigger="functools[",
        prefix="functools[",
        suffix="]",
    ),
    "deepseek_v3": CallFormat(
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        **_DEEPSEEK,
    ),
    "deepseek_v31": CallFormat(
        begin="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        separator="",
        **_DEEPSEEK,
    ),
    "kimi_k2": CallFormat(
        keeps_space=True,
        opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        between=("<|tool_call_end|>",),
        closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        heads=(
            "functions.%s:%d~<|tool_call_argument_begin|>~&{",
            "%s:%d~<|tool_call_argument_begin|>~&{",
            "%s~<|tool_call_argument_begin|>~&{",
        ),
        id_form="functions.%s:%d",
        trigger="<|tool_calls_section_begin|>",
        prefix="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        separator="",
        suffix="<|tool_calls_section_end|>",
    ),
    "internlm": CallFormat(
        opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        closes=("<|action_end|>",),
        trigger="<|action_start|>",
        begin='<|action_start|><|plugin|>\n{"name": "%s", "parameters": ',
        end="}\n<|action_end|>",
        separator="\n",
    ),
    "jamba": JAMBA,
    "hunyuan_a13b": replace(JAMBA, keeps_space=True),
    "minimax": CallFormat(
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        trigger="<tool_calls>",
        prefix="<tool_calls>\n",
        separator="\n",
        suffix="\n</tool_calls>",
    ),
    "apertus": CallFormat(
        opens=("<|tools_prefix|>",),
        between=("}",),
        closes=("<|tools_suffix|>",),
        heads=('{~"%s"~:~&{',),
        has_named_objects=True,
        trigger="<|tools_prefix|>",
        prefix="<|tools_prefix|>[",
        begin='{"%s": ',
        suffix="]<|tools_suffix|>",
    ),
    "gigachat3": CallFormat(
        opens=("<|function_call|>", "function call<|role_sep|>\n"),
        closes=("</s>",),
        hidden=("<|message_sep|>\n\n",),
        trigger="<|function_call|>",
        begin='<|function_call|>{"name": "%s", "arguments": ',
        separator="\n",
    ),
    "granite-20b-fc": CallFormat(
        opens=("<function_call>",),
        trigger="<function_call>",
        begin='<function_call> {"name": "%s", "arguments": ',
        separator="\n",
    ),
    "cohere_command3": CallFormat(
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        trigger="<|START_ACTION|>",
        prefix="<|START_ACTION|>[",
        begin='{"tool_call_id": "0", "tool_name": "%s", "parameters": ',
        suffix="]<|END_ACTION|>",
    ),
    "inkling": CallFormat(
        opens=("<|content_invoke_tool_json|>",),
        closes=_INKLING_ENDS,
        hidden=("<|message_model|>", "<|content_text|>", *_INKLING_ENDS),
        trigger="<|content_invoke_tool_json|>",
        begin='<|content_invoke_tool_json|>{"name": "%s", "args": ',
        end="}<|end_message|>",
        separator="<|message_model|>",
    ),
    "plamo3": CallFormat(
        opens=(_PLAMO % "begin_tool_requests", _PLAMO % "begin_tool_request"),
        between=(_PLAMO % "end_tool_request", _PLAMO % "end_tool_arguments"),
        closes=(_PLAMO % "end_tool_requests",),
        keeps_space=True,
        heads=(f"{_PLAMO_NAME}%s{_PLAMO_ARGUMENTS}&{{",),
        trigger=_PLAMO % "begin_tool_requests",
        prefix=_PLAMO % "begin_tool_requests",
        begin=f"{_PLAMO % 'begin_tool_request'}{_PLAMO_NAME}%s{_PLAMO_ARGUMENTS}",
        end=_PLAMO % "end_tool_arguments" + _PLAMO % "end_tool_request",
        separator="",
        suffix=_PLAMO % "end_tool_requests",
    ),
    "xlam": CallFormat(
        opens=("[TOOL_CALLS]", "<tool_call>", "```json"),
        closes=("</tool_call>", "```"),
        unmarked=('[{"name": "',),
        checks_names=True,
        bare_starts="{[",
        trigger='[{"name": "',
        prefix="[",
        suffix="]",
    ),
}
