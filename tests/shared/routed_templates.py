# SPDX-License-Identifier: Apache-2.0
"""Chat templates that do what those of GLM, MiniMax, DeepSeek and Kimi do, and replies as these models write them.

They are written for these tests, as those of family_templates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from family_templates import BOTH, JSON_ARGUMENTS, Chat, show, switch
from qwen_templates import Reply

_TEXTS: Mapping[str, str] = {
    "hotel": "007",
    "nights": "3",
    "price": "99.5",
    "smoking": "false",
    "guests": '["Zoë", "O\\"Neill"]',
    "address": '{"city": "<Paris>"}',
    "note": "null",
}


def _reply(text: str, look_alike: str, *, gap: str = "") -> tuple[Reply, ...]:
    """Return a reply with two calls behind a sentence, and one that only speaks of calls; gap: what is kept between."""
    calling = Reply(text=f"I will book it.{gap}{text}", content=f"I will book it.{gap}", calls=BOTH)
    return calling, Reply(text=look_alike, content=look_alike)


def _glm(line: str) -> dict[str, str]:
    """Return the parts of a template of GLM; line: what is between the parts of a call."""
    escaped = line.replace("\n", r"\n")
    return {
        "BEGIN": "[gMASK]<sop>",
        "TURN": "<|",
        "LINE": r"|>\n",
        "END": "",
        "FORM": rf"<tool_call>NAME{escaped}<arg_key>KEY</arg_key>{escaped}<arg_value>VALUE</arg_value>{escaped}"
        "</tool_call>",
        "SHOW": show(r"<think>", r"</think>\n"),
        "CALL": rf"""
            {{{{- '\n<tool_call>' + call.name + '{escaped}' }}}}
            {{%- for name, value in call.arguments | items %}}
                {{{{- '<arg_key>' + name + '</arg_key>{escaped}<arg_value>' }}}}
                {{{{- (value if value is string else value | tojson) + '</arg_value>{escaped}' }}}}
            {{%- endfor %}}
            {{{{- '</tool_call>' }}}}""",
    }


def _glm_replies(line: str) -> tuple[Reply, ...]:
    pairs = "".join(
        f"<arg_key>{name}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for name, value in _TEXTS.items()
    )
    calls = f"<tool_call>book_room{line}{pairs}</tool_call>\n<tool_call>today{line}</tool_call>"
    return _reply(f"\n{calls}", "A call has <arg_key> and <arg_value> tags.")


def _write_deepseek(call: Callable[[str, str], str]) -> str:
    both = call("book_room", JSON_ARGUMENTS) + call("today", "{}")
    return f"<｜tool▁calls▁begin｜>{both}<｜tool▁calls▁end｜>"


def _deepseek(begin: str, end: str) -> dict[str, str]:
    """Return the parts of a template of DeepSeek; begin and end: what is around a call's arguments."""
    begin, end = (text.replace("\n", r"\n") for text in (begin, end))
    return {
        "BEGIN": "<｜begin▁of▁sentence｜>",
        "TURN": "<｜",
        "LINE": "｜>",
        "END": "<｜end▁of▁sentence｜>",
        "MODEL": "Assistant",
        "FORM": "<｜tool▁calls▁begin｜>" + begin.replace("%s", "NAME") + "{}" + end + "<｜tool▁calls▁end｜>",
        "FIRST": "<｜tool▁calls▁begin｜>",
        "CALL": "{{- '" + begin.replace("%s", "' + call.name + '") + "' + call.arguments | tojson + '" + end + "' }}",
        "LAST": "<｜tool▁calls▁end｜>",
    }


_V3 = ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n", "\n```<｜tool▁call▁end｜>")
_V31 = ("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def _deepseek_replies(begin: str, end: str) -> tuple[Reply, ...]:
    text = _write_deepseek(lambda name, arguments: begin % name + arguments + end)
    return _reply(text, "A call begins with <｜tool▁calls and goes on.")


_MINIMAX = {
    "BEGIN": "]~!b[",
    "TURN": "]~b]",
    "END": r"[e~[\n",
    "MODEL": "ai",
    "FORM": r'<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "SHOW": show(r"<think>\n", r"\n</think>\n\n"),
    "FIRST": r"\n<minimax:tool_call>\n",
    "CALL": r"""
            {{- '<invoke name="' + call.name + '">\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter name="' + name + '">' + (value if value is string else value | tojson) }}
                {{- '</parameter>\n' }}
            {%- endfor %}
            {{- '</invoke>\n' }}""",
    "LAST": "</minimax:tool_call>",
    "OPEN": r"{{- '<think>\n' }}",
}
_MINIMAX_PAIRS = "".join(f'<parameter name="{name}">{value}</parameter>\n' for name, value in _TEXTS.items())
_KIMI = {
    "TURN": "<|im_",
    "LINE": "<|im_middle|>",
    "END": "<|im_end|>",
    "FORM": "functions.NAME:0<|tool_call_argument_begin|>{}",
    "FIRST": "<|tool_calls_section_begin|>",
    "CALL": """{{- '<|tool_call_begin|>functions.' + call.name + ':' + loop.index0 | string }}
            {{- '<|tool_call_argument_begin|>' + call.arguments | tojson + '<|tool_call_end|>' }}""",
    "LAST": "<|tool_calls_section_end|>",
}
_KIMI_REPLIES = _reply(
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.book_room:0<|tool_call_argument_begin|>"
    f"{JSON_ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.today:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "A call is functions.today:0 in a section.",
)
_GLM_45 = Chat(
    calls="glm45",
    reasoning="glm45",
    parts=_glm("\n") | {"OPEN": switch("enable_thinking is undefined or enable_thinking", "", r"<think></think>\n")},
    off={"enable_thinking": False},
    thought="<think>%s</think>",
    replies=_glm_replies("\n"),
)
_KIMI_K2 = Chat(calls="kimi_k2", parts=_KIMI, replies=_KIMI_REPLIES)
MODELS = {
    "GLM-4.5": _GLM_45,
    "GLM-4.6": _GLM_45,
    "GLM-4.7": replace(
        _GLM_45,
        calls="glm47",
        parts=_glm("") | {"OPEN": switch("enable_thinking is undefined or enable_thinking", "<think>", "</think>")},
        is_open=True,
        thought="%s</think>",
        replies=_glm_replies(""),
    ),
    "MiniMax-M2": Chat(
        calls="minimax_m2",
        reasoning="qwen3",
        parts=_MINIMAX,
        is_open=True,
        thought="%s\n</think>\n\n",
        kept="%s\n",
        gap="\n\n",
        replies=_reply(
            f'<minimax:tool_call>\n<invoke name="book_room">\n{_MINIMAX_PAIRS}</invoke>\n'
            '<invoke name="today">\n</invoke>\n</minimax:tool_call>',
            "A call is <invoke> between tags.",
        ),
    ),
    "DeepSeek-V3": Chat(calls="deepseek_v3", parts=_deepseek(*_V3), replies=_deepseek_replies(*_V3)),
    "DeepSeek-R1": Chat(
        calls="deepseek_v3",
        reasoning="qwen3",
        parts=_deepseek(*_V3) | {"OPEN": r"{{- '<think>\n' }}"},
        is_open=True,
        thought="%s\n</think>\n\n",
        kept="%s\n",
        gap="\n\n",
        replies=_deepseek_replies(*_V3),
    ),
    "DeepSeek-V3.1": Chat(
        calls="deepseek_v31",
        reasoning="qwen3",
        parts=_deepseek(*_V31) | {"OPEN": switch("thinking", "<think>", "</think>")},
        on={"thinking": True},
        off={"thinking": False},
        is_open=True,
        thought="%s</think>",
        replies=_deepseek_replies(*_V31),
    ),
    "Kimi-K2": _KIMI_K2,
    "Kimi-K2-Thinking": replace(
        _KIMI_K2,
        reasoning="kimi_k2",
        parts=_KIMI | {"SHOW": show("<think>", "</think>")},
        thought="<think>%s</think>",
    ),
}
