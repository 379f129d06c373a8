# SPDX-License-Identifier: Apache-2.0
"""Chat templates that do what those of the Qwen models of 2025 and 2026 do, and replies as these models write them.

They are written for these tests. What a published template decides is kept: the form of calls, whether it opens the
reasoning, which earlier reasoning it shows, what it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Calls = Literal["hermes", "qwen3_coder"]

_TEMPLATE = r"""
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content or [] %}{{- item.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) + '\n\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\n\n<tools>' }}
        {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
        {{- '\n</tools>\n\n@FORM@' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if last.query < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + text_of(message.content) + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}@SHOW@
        {{- text_of(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}@CALL@
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + text_of(message.content) + '\n</tool_response><|im_end|>\n' }}
    {%- else %}{{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}@OPEN@
{%- endif %}
"""
_FORMS: dict[Calls, str] = {
    "hermes": r'<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "qwen3_coder": r"<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
}
_CALLS: dict[Calls, str] = {
    "hermes": r"""
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + arguments + '}\n</tool_call>' }}""",
    "qwen3_coder": r"""
            {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}""",
}
_SHOW = r"""
        {%- if message.reasoning_content is string and (@KEEPS@loop.index0 > last.query) %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}"""
_KEEPS = {
    "turn": "",
    "asked": "(preserve_thinking is defined and preserve_thinking) or ",
    "all": "preserve_thinking is undefined or preserve_thinking or ",
}
_OPENS = {
    "never": "",
    "always": r"{{- '<think>\n' }}",
    "switch": r"""
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}
    {%- else %}{{- '<think>\n' }}{%- endif %}""",
}


@dataclass(frozen=True, kw_only=True)
class Qwen:
    """What a model's template does."""

    calls: Calls
    opens: Literal["never", "always", "switch"] = "never"  # reasoning; "switch": unless enable_thinking is false
    keeps: Literal["turn", "asked", "all"] = "turn"  # earlier reasoning: that of this turn, or what is switched

    @property
    def template(self) -> str:
        """The chat template."""
        show = "" if self.opens == "never" else _SHOW.replace("@KEEPS@", _KEEPS[self.keeps])
        parts = {"FORM": _FORMS[self.calls], "CALL": _CALLS[self.calls], "SHOW": show, "OPEN": _OPENS[self.opens]}
        text = _TEMPLATE
        for name, part in parts.items():
            text = text.replace(f"@{name}@", part)
        return text


MODELS = {
    "Qwen3-Next-Instruct": Qwen(calls="hermes"),
    "Qwen3-Next-Thinking": Qwen(calls="hermes", opens="always"),
    "Qwen3-VL-Instruct": Qwen(calls="hermes"),
    "Qwen3-VL-Thinking": Qwen(calls="hermes", opens="always"),
    "Qwen3-Coder-Next": Qwen(calls="qwen3_coder"),
    "Qwen3.5": Qwen(calls="qwen3_coder", opens="switch"),
    "Qwen3.6": Qwen(calls="qwen3_coder", opens="switch", keeps="asked"),
    "Qwen3.8": Qwen(calls="qwen3_coder", opens="switch", keeps="all"),
}

ROOM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "hotel": {"type": "string"},
        "nights": {"type": "integer"},
        "price": {"type": "number"},
        "smoking": {"type": "boolean"},
        "guests": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["hotel"],
    "additionalProperties": False,
}
SCHEMAS = {"book_room": ROOM, "today": {"type": "object", "properties": {}}}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model writes behind an open or absent reasoning, and what it means."""

    text: str
    content: str
    calls: tuple[tuple[str, Any], ...] = ()


ARGUMENTS = {
    "hotel": "007",  # which looks like a number, and is none by the schema
    "nights": 3,
    "price": 99.5,
    "smoking": False,
    "guests": ["Zoë", 'O"Neill'],
    "address": {"city": "<Paris>"},
    "note": None,
}
THOUGHT = "Two steps:\n1. the date <today>\n2. then the room."
HERMES_REPLIES = (
    Reply(
        text='I will book it.\n\n<tool_call>\n{"name": "book_room", "arguments": {"hotel": "007", "nights": 3, '
        '"price": 99.5, "smoking": false, "guests": ["Zoë", "O\\"Neill"], "address": {"city": "<Paris>"}, '
        '"note": null}}\n</tool_call>\n<tool_call>\n{"name": "today", "arguments": {}}\n</tool_call>',
        content="I will book it.",
        calls=(("book_room", ARGUMENTS), ("today", {})),
    ),
    Reply(text='Write <tool_call> and {"name": "book_room"}.', content='Write <tool_call> and {"name": "book_room"}.'),
)
REPLIES: dict[Calls, tuple[Reply, ...]] = {
    "hermes": HERMES_REPLIES,
    "qwen3_coder": (
        Reply(
            text="I will book it.\n\n<tool_call>\n<function=book_room>\n<parameter=hotel>\n007\n</parameter>\n"
            "<parameter=nights>\n3\n</parameter>\n<parameter=price>\n99.5\n</parameter>\n<parameter=smoking>\nFalse\n"
            '</parameter>\n<parameter=guests>\n["Zoë", "O\\"Neill"]\n</parameter>\n<parameter=address>\n'
            '{"city": "<Paris>"}\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>\n'
            "<tool_call>\n<function=today>\n</function>\n</tool_call>",
            content="I will book it.",
            calls=(("book_room", ARGUMENTS), ("today", {})),
        ),
        Reply(
            text="<tool_call>\n<function=book_room>\n<parameter=hotel>\ndef f():\n\n    return '</b>'\n\n</parameter>\n"
            "<parameter=note>\nnone of <these>\n</parameter>\n</function>\n</tool_call>",
            content="",
            calls=(("book_room", {"hotel": "def f():\n\n    return '</b>'\n", "note": "none of <these>"}),),
        ),
        Reply(text="Write <tool_call> and <function> tags.", content="Write <tool_call> and <function> tags."),
    ),
}
