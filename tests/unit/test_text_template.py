# SPDX-License-Identifier: Apache-2.0
"""Chat templates against transformers' rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from blink.errors import BadRequestError, ConfigError
from blink.text.conversation import flatten_messages
from blink.text.template import ChatTemplate
from make_tokenizer import FOLDER
from model_mutations import memory_limit

LLAMA_LIKE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {{- "<|" + message.role + "|>\\n" + message.content | trim + "<|eot|>" }}
{%- endfor %}
{% if tools %}
{{ tools | tojson(indent=2) }}
{% endif %}
{%- if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% generation %}{% endgeneration %}{% endif %}"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&'\" é"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaces \n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ],
]


def templates() -> list[str]:
    return [LLAMA_LIKE, json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]]


def render_reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, bos_token="<s>", **options)
    return rendered[0]


@pytest.mark.parametrize("source", templates())
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<é>"}}]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(
        messages, add_generation_prompt=add_generation_prompt, variables={"tools": tools}
    )
    expected = render_reference(source, messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert ours == expected


@pytest.mark.parametrize("source", templates())
@pytest.mark.parametrize("start", ["The answer", " padded ", "2"])
def test_the_final_message_stays_open_as_in_transformers(source: str, start: str) -> None:
    messages = [*CHATS[2], {"role": "assistant", "content": start}]
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert ours == render_reference(source, messages, continue_final_message=True)


def test_template_variables_of_the_request_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ strftime_now('%%') }}", {})
    assert template.render(CHATS[0], variables={"enable_thinking": False}) == "False%"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system please') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ChatTemplate(source, {}).render(CHATS[0])
    assert caught.value.param == "messages"


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip all": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a loop that enters itself twice": (
        "{% for a in [60] recursive %}{% if a %}{{ loop([a - 1]) }}{{ loop([a - 1]) }}{% endif %}{% endfor %}"
    ),
    "text that doubles": "{% set n = namespace(t='xx') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "lists that double": "{% set n = namespace(t=[1]) %}{% for a in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "a repeated text": "{{ 'x' * 99999999999 }}",
    "a repeated list": "{{ [1] * 99999999999 }}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "a large text in a loop": "{% set x = 'x' * 9999999 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "written text in a loop": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "text of a macro": "{% macro f() %}"
    + "x" * 9999
    + "{% endmacro %}{% for a in range(99999) %}{% set b = f() %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_refused(source: str) -> None:
    with pytest.raises(BadRequestError, match=r"it does too much|takes longer than"), memory_limit(1 << 30):
        ChatTemplate(source, {}).render(CHATS[0])


def test_a_deeply_nested_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 100_000, {})


def test_long_conversations_are_no_endless_ones() -> None:
    message = {"role": "user", "content": "word " * 200_000}
    text = ChatTemplate(LLAMA_LIKE, {"bos_token": "<s>"}).render([message] * 8)
    assert text.count("word") == 8 * 200_000
    short = {"role": "user", "content": "x"}
    assert ChatTemplate(LLAMA_LIKE, {"bos_token": "<s>"}).render([short] * 20_000).count("<|user|>") == 20_000


def test_a_malformed_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    assert flatten_messages(messages) == [
        {"role": "user", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": 3, "content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": [{"type": "text"}]},
    ],
)
def test_other_content_is_a_bad_request(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        flatten_messages([message])
    assert caught.value.param == "messages"
