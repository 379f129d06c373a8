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
HERMES = _tagged("<tool_call>", "</tool_call>")
JSON_FORMATS = {
    "hermes": HERMES,
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "llama3_json": CallFormat(
        opens=("<|python_tag|>", "<|python_start|>"),
        closes=("<|python_end|>",),
        bare_starts="{[",
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
    "jamba": CallFormat(
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        trigger="<tool_calls>",
        prefix="<tool_calls>[",
        suffix="]</tool_calls>",
    ),
    "minimax": CallFormat(
        opens=("<tool_calls>",),
        closes=("</tool_calls>",),
        trigger="<tool_calls>",
        prefix="<tool_calls>\n",
        separator="\n",
        suffix="\n</tool_calls>",
    ),
    "xlam": CallFormat(
        opens=("[TOOL_CALLS]", "<tool_call>"),
        closes=("</tool_call>",),
        bare_starts="{[",
        trigger='[{"name": "',
        prefix="[",
        suffix="]",
    ),
}
