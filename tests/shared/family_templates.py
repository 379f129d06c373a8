# SPDX-License-Identifier: Apache-2.0
"""Chat templates that do what those of the small families of 2025 and 2026 do, and replies as these models write them.

They are written for these tests. What a published template decides is kept: its turns, the form of calls, and what of
the reasoning it writes into the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen_templates import ARGUMENTS, HERMES_REPLIES, Reply

_TEMPLATE = r"""
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content or [] %}{{- item.text }}{%- endfor %}{%- endif %}
{%- endmacro %}@MACROS@
{{- '@BEGIN@' }}@MODE@
{%- if tools %}
    {{- '@TURN@system@LINE@' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\nFor a call write:\n@FORM@' + '@END@' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '@TURN@@MODEL@@LINE@' }}@SHOW@
        {{- text_of(message.content) }}
        {%- if message.tool_calls %}{{- '@FIRST@' }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}@CALL@
        {%- endfor %}
        {%- if message.tool_calls %}{{- '@LAST@' }}{%- endif %}
        {{- '@END@' }}
    {%- else %}
        {{- '@TURN@' + message.role + '@LINE@' + text_of(message.content) + '@END@' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '@TURN@@MODEL@@LINE@' }}@OPEN@
{%- endif %}
"""
_GEMMA_VALUE = r"""
{%- macro write(value) %}
    {%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping %}{{- '{' }}{%- for name, item in value | items %}
        {{- name + ':' + write(item) + ('' if loop.last else ',') }}{%- endfor %}{{- '}' }}
    {%- elif value is iterable %}{{- '[' }}{%- for item in value %}
        {{- write(item) + ('' if loop.last else ',') }}{%- endfor %}{{- ']' }}
    {%- else %}{{- value | tojson }}{%- endif %}
{%- endmacro %}"""
_HERMES_CALL = r"""
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
            {{- '}\n</tool_call>' }}"""
_SEED_CALL = r"""
            {{- '<seed:tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>' + (value if value is string else value | tojson) + '</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</seed:tool_call>' }}"""
_OLMO_CALL = r"""
            {{- call.name + '(' }}
            {%- for name, value in call.arguments | items %}
                {{- name + '=' + value | tojson + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ')' + ('' if loop.last else '\n') }}"""
_HERMES_FORM = r'<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


def show(begin: str, end: str) -> str:
    """Return what shows earlier reasoning between marks."""
    return rf"""
        {{%- if message.reasoning_content %}}
            {{{{- '{begin}' + message.reasoning_content + '{end}' }}}}
        {{%- endif %}}"""


def switch(name: str, on: str, off: str) -> str:
    """Return what writes a text by a condition."""
    return rf"{{%- if {name} %}}{{{{- '{on}' }}}}{{%- else %}}{{{{- '{off}' }}}}{{%- endif %}}"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """What a model's template does, and how the model replies."""

    calls: str = ""  # the name of their format; empty: it knows none
    reasoning: str = ""  # likewise
    parts: Mapping[str, str]
    on: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the template's variables with which it reasons
    off: Mapping[str, Any] | None = None  # and does not; None: there is no such switch
    is_open: bool = False  # the prompt ends inside of the reasoning
    thought: str = "%s"  # the reasoning and its marks, as far as the model writes them
    kept: str = "%s"  # the reasoning as it is read, with the line breaks that its format keeps
    gap: str = ""  # what the format keeps of the line breaks between reasoning and answer
    answer: str = "%s"
    replies: tuple[Reply, ...] = (Reply(text="Write <x>.", content="Write <x>."),)

    @property
    def template(self) -> str:
        """The chat template."""
        parts = dict.fromkeys(("MACROS", "BEGIN", "MODE", "FORM", "SHOW", "FIRST", "CALL", "LAST", "OPEN"), "")
        parts |= {"TURN": "<|im_start|>", "LINE": r"\n", "END": r"<|im_end|>\n", "MODEL": "assistant", **self.parts}
        text = _TEMPLATE
        for name, part in parts.items():
            text = text.replace(f"@{name}@", part)
        return text


JSON_ARGUMENTS = (
    '{"hotel": "007", "nights": 3, "price": 99.5, "smoking": false, "guests": ["Zoë", "O\\"Neill"], '
    '"address": {"city": "<Paris>"}, "note": null}'
)
BOTH = (("book_room", ARGUMENTS), ("today", {}))


def _calling(text: str, look_alike: str) -> tuple[Reply, ...]:
    """Return a reply with two calls behind a sentence, and one that only speaks of calls."""
    calling = Reply(text=f"I will book it.\n\n{text}", content="I will book it.", calls=BOTH)
    return calling, Reply(text=look_alike, content=look_alike)


_GEMMA_REPLIES = _calling(
    '<|tool_call>call:book_room{hotel:<|"|>007<|"|>,nights:3,price:99.5,smoking:false,'
    'guests:[<|"|>Zoë<|"|>,<|"|>O"Neill<|"|>],address:{city:<|"|><Paris><|"|>},note:null}<tool_call|>'
    "<|tool_call>call:today{}<tool_call|>",
    "A call begins with call:today{}.",
)
_MISTRAL_REPLIES = _calling(
    f"[TOOL_CALLS]book_room[ARGS]{JSON_ARGUMENTS}[TOOL_CALLS]today[ARGS]{{}}",
    "A call is today[ARGS]{} behind its mark.",
)
_MISTRAL_LISTS = _calling(
    f'[TOOL_CALLS] [{{"name": "book_room", "arguments": {JSON_ARGUMENTS}, "id": "abcdefghi"}}, '
    '{"name": "today", "arguments": {}, "id": "abcdefghj"}]',
    'A call is {"name": "today"} in a list.',
)
_OLMO_REPLIES = _calling(
    '<function_calls>book_room(hotel="007", nights=3, price=99.5, smoking=false, guests=["Zoë", "O\\"Neill"], '
    'address={"city": "<Paris>"}, note=null)\ntoday()</function_calls>',
    "A call is today() between tags.",
)
_SEED_REPLIES = _calling(
    "<seed:tool_call>\n<function=book_room>\n<parameter=hotel>007</parameter>\n<parameter=nights>3</parameter>\n"
    "<parameter=price>99.5</parameter>\n<parameter=smoking>false</parameter>\n"
    '<parameter=guests>["Zoë", "O\\"Neill"]</parameter>\n<parameter=address>{"city": "<Paris>"}</parameter>\n'
    "<parameter=note>null</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=today>\n</function>\n</seed:tool_call>",
    "A call is <seed:tool_call> and a function.",
)
_GEMMA = {
    "MACROS": _GEMMA_VALUE,
    "TURN": "<|turn>",
    "END": r"<turn|>\n",
    "MODEL": "model",
    "MODE": r"{%- if enable_thinking %}{{- '<|turn>system\n<|think|>\n<turn|>\n' }}{%- endif %}",
    "FORM": "<|tool_call>call:NAME{key:value}<tool_call|>",
    "SHOW": show(r"<|channel>thought\n", r"\n<channel|>"),
    "CALL": "{{- '<|tool_call>call:' + call.name + write(call.arguments) + '<tool_call|>' }}",
}
_MISTRAL = {"BEGIN": "<s>", "TURN": "[", "LINE": "]", "END": "</s>", "FORM": "[TOOL_CALLS]NAME[ARGS]{}"}
_MISTRAL |= {"CALL": "{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}"}
_HERMES = {"FORM": _HERMES_FORM, "CALL": _HERMES_CALL}
MODELS = {
    # Small ones write nothing into the prompt where they are not to think.
    "Gemma-4-E4B": Chat(
        calls="gemma4",
        reasoning="gemma4",
        parts=_GEMMA,
        on={"enable_thinking": True},
        off={},
        thought="<|channel>thought\n%s\n<channel|>",
        replies=_GEMMA_REPLIES,
    ),
    "Gemma-4-31B": Chat(
        calls="gemma4",
        reasoning="gemma4",
        parts=_GEMMA | {"OPEN": switch("enable_thinking", "", r"<|channel>thought\n<channel|>")},
        on={"enable_thinking": True},
        off={},
        thought="<|channel>thought\n%s\n<channel|>",
        replies=_GEMMA_REPLIES,
    ),
    "Mistral-Small-3.1": Chat(
        calls="mistral",
        parts=_MISTRAL
        | {
            "FORM": '[TOOL_CALLS] [{"name": NAME, "arguments": {}}]',
            "FIRST": "[TOOL_CALLS] [",
            "CALL": r"""{{- '{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' }}
            {{- '' if loop.last else ', ' }}""",
            "LAST": "]",
        },
        replies=_MISTRAL_LISTS,
    ),
    "Mistral-Small-3.2": Chat(calls="mistral", parts=_MISTRAL, replies=_MISTRAL_REPLIES),
    "Ministral-3-Instruct": Chat(calls="mistral", parts=_MISTRAL, replies=_MISTRAL_REPLIES),
    "Ministral-3-Reasoning": Chat(
        calls="mistral",
        reasoning="mistral",
        parts=_MISTRAL | {"SHOW": show("[THINK]", "[/THINK]")},
        thought="[THINK]%s[/THINK]",
        replies=_MISTRAL_REPLIES,
    ),
    "Olmo-3-Instruct": Chat(
        calls="olmo3",
        parts={
            "FORM": "<function_calls>f(x=1)</function_calls>",
            "FIRST": "<function_calls>",
            "CALL": _OLMO_CALL,
            "LAST": "</function_calls>",
        },
        replies=_OLMO_REPLIES,
    ),
    "Olmo-3-Think": Chat(
        reasoning="qwen3",
        parts={"OPEN": "{{- '<think>' }}"},
        is_open=True,
        thought="%s</think>",
    ),
    "SmolLM3": Chat(
        calls="hermes",
        reasoning="qwen3",
        parts=_HERMES
        | {
            "SHOW": show(r"<think>\n", r"\n</think>\n"),
            "OPEN": switch("enable_thinking is undefined or enable_thinking", "", r"<think>\n\n</think>\n"),
        },
        off={"enable_thinking": False},
        thought="<think>\n%s\n</think>\n",
        kept="\n%s\n",
        gap="\n",
        replies=HERMES_REPLIES,
    ),
    "Seed-OSS": Chat(
        calls="seed_oss",
        reasoning="seed_oss",
        parts={
            "TURN": "<seed:bos>",
            "END": "<seed:eos>",
            "FORM": r"<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
            "SHOW": show("<seed:think>", "</seed:think>"),
            "CALL": _SEED_CALL,
            "OPEN": switch(
                "thinking_budget == 0",
                r"<seed:think><seed:cot_budget_reflect>No budget.</seed:cot_budget_reflect>\n</seed:think>",
                "",
            ),
        },
        off={"thinking_budget": 0},
        thought="<seed:think>%s</seed:think>",
        replies=_SEED_REPLIES,
    ),
    "Granite-4": Chat(calls="hermes", parts=_HERMES, replies=HERMES_REPLIES),
    "Granite-4-preview": Chat(
        calls="granite",
        reasoning="ernie45",
        parts={
            "FORM": '<|tool_call|>[{"name": NAME, "arguments": {}}]',
            "MODE": r"""{%- if thinking %}
            {{- 'Think between <think></think> and answer between <response></response>.' }}{%- endif %}""",
            "FIRST": "<|tool_call|>[",
            "CALL": r"""{{- '{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' }}
            {{- '' if loop.last else ', ' }}""",
            "LAST": "]",
        },
        on={"thinking": True},
        off={"thinking": False},
        thought="<think>%s</think>\n",
        answer="<response>%s</response>",
    ),
    "Ernie-4.5-Thinking": Chat(
        calls="hermes",
        reasoning="ernie45",
        parts=_HERMES
        | {
            "MODE": "{#- An answer stands between <response> and </response>. #}",
            "SHOW": show(r"<think>\n", r"\n</think>\n"),
            "OPEN": r"{{- '<think>\n' }}",
        },
        is_open=True,
        thought="%s\n</think>\n\n\n",
        replies=HERMES_REPLIES,
    ),
    "Ernie-4.5-Thinking-answer": Chat(
        reasoning="ernie45",
        parts={
            "MODE": "{#- An answer stands between <response> and </response>. #}",
            "OPEN": r"{{- '<think>\n' }}",
        },
        is_open=True,
        thought="%s\n</think>\n\n",
        answer="<response>\n%s\n</response>",
    ),
    "Ernie-4.5": Chat(parts={"TURN": "", "LINE": ": ", "END": r"\n"}),
}
