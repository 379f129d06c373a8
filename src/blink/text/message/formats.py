# SPDX-License-Identifier: Apache-2.0
"""The ways in which models write tool calls and reasoning, by vLLM's names, and which of them a template speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blink.text.message.format_kinds import CallFormat, ReasoningFormat
from blink.text.message.json_formats import JSON_FORMATS, MISTRAL_NAMED
from blink.text.message.other_formats import OTHER_FORMATS

HARMONY = CallFormat(opens=(), trigger="", uses_harmony=True)
HARMONY_REASONING = ReasoningFormat("", "", uses_harmony=True)
CALL_FORMATS = {"openai": HARMONY, **JSON_FORMATS, **OTHER_FORMATS}
HERMES = CALL_FORMATS["hermes"]
REASONING_FORMATS = {
    "openai_gptoss": HARMONY_REASONING,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begins_inside=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    # Qwen 3.5 may call without closing its reasoning; the JSON form of calls stays reasoning there.
    "qwen3": ReasoningFormat("<think>", "</think>", ends=("<tool_call>\n<function=",)),
    "kimi_k2": ReasoningFormat("<think>", "</think>", ends=("<|tool_calls_section_begin|>",)),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", begins_inside=True),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        other_opens=("Here's my thought process:",),
        other_closes=("Here's my response:",),
    ),
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", answer_tags=("<answer>", "</answer>")),
    "ernie45": ReasoningFormat("<think>", "</think>", begins_inside=True, answer_tags=("<response>", "</response>")),
    "minimax_m2_append_think": ReasoningFormat("<think>", "</think>", begins_inside=True, is_content=True),
}

_Signs = Sequence[tuple[str, tuple[str, ...]]]
# The first is chosen of which the template has all signs.
_CALL_SIGNS: _Signs = (
    ("openai", ("<|channel|>commentary",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v32", ("｜DSML｜function_calls",)),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("step3", ("<steptml:invoke",)),
    ("qwen3_coder", ("<function=",)),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("internlm", ("<|action_start|>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("jamba", ("<tool_calls>[",)),
    ("minimax", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|/tool|>",)),
    ("phi4_mini_json", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("llama3_json", ("<|python_tag|>",)),
)
_REASONING_SIGNS: _Signs = (
    ("seed_oss", ("<seed:think>",)),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("hunyuan_a13b", ("<answer>", "<think>")),
    ("ernie45", ("<response>", "<think>")),
    ("qwen3", ("<think>",)),
    ("qwen3", ("</think>",)),
)


def find_call_format(template: str) -> str:
    """Return the name of the format of calls that a chat template speaks, empty for none that is known."""
    return _find(template, _CALL_SIGNS)


def fit_call_format(form: CallFormat, template: str) -> CallFormat:
    """Return a format as the models of a chat template write it, where those of one format differ."""
    return MISTRAL_NAMED if form is CALL_FORMATS["mistral"] and "[ARGS]" in template else form


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of reasoning that a chat template speaks, None for none that is known.

    It begins with its opening tag, of the prompt or of the reply.
    """
    name = _find(template, _REASONING_SIGNS)
    return replace(REASONING_FORMATS[name], begins_inside=False) if name else None


def _find(template: str, known: _Signs) -> str:
    return next((name for name, signs in known if all(sign in template for sign in signs)), "")
