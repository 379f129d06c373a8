# SPDX-License-Identifier: Apache-2.0
"""The ways in which models write tool calls, by vLLM's names, and which of them a template speaks."""

from __future__ import annotations

from blink.text.message.format_kinds import CallFormat, Signs, find_format, find_tag_end
from blink.text.message.json_formats import JSON_FORMATS, MISTRAL_NAMED
from blink.text.message.literal_formats import LITERAL_FORMATS
from blink.text.message.tagged_formats import TAGGED_FORMATS, keyed

HARMONY = CallFormat(opens=(), trigger="", uses_harmony=True)
CALL_FORMATS = {"openai": HARMONY, **JSON_FORMATS, **TAGGED_FORMATS, **LITERAL_FORMATS}
HERMES = CALL_FORMATS["hermes"]
# The first is chosen of which the template has all signs.
_CALL_SIGNS: Signs = (
    ("openai", ("<|channel|>commentary",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("dots", ("<dots_function_call>",)),
    ("k2_horizon", ("<ifm|tool_call>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("deepseek_v32", ("｜DSML｜function_calls",)),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("deepseek_v41", ("｜DSML｜ calls",)),
    ("step3", ("<steptml:invoke",)),
    ("qwen3_coder", ("<function=",)),
    ("hy_v4", ("<tool_calls:", "<arg_key:")),
    ("hy_v3", ("<tool_sep>", "<arg_key>")),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("gigachat3", ("<|function_call|>",)),
    ("gigachat3", ("function call<|role_sep|>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("plamo3", ("<|plamo:begin_tool_request",)),
    ("minicpm5", ("<function name=",)),
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
    ("granite-20b-fc", ("<function_call>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("llama3_json", ("<|python_tag|>",)),
)


def find_call_format(template: str) -> str:
    """Return the name of the format of calls that a chat template speaks, empty for none that is known."""
    return find_format(template, _CALL_SIGNS)


def fit_call_format(form: CallFormat, template: str) -> CallFormat:
    """Return a format as the models of a chat template write it, where those of one format differ."""
    if form is CALL_FORMATS["mistral"] and "[ARGS]" in template:
        return MISTRAL_NAMED
    return keyed("", "", find_tag_end(template)) if form is CALL_FORMATS["hy_v4"] else form
