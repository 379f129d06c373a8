# SPDX-License-Identifier: Apache-2.0
"""Conversations reach chat templates in the form that these take, whatever form a client sends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from blink.api.openai.responses.schema import ResponsesBody
from blink.api.openai.schema import ChatBody
from blink.errors import BadRequestError
from blink.request.rendering import render_messages
from blink.text import template_budget, template_traits
from blink.text.assets import ModelAssets
from blink.text.template import ChatTemplate
from blink.text.tokenizer import NoTokenizer
from cpu_seconds import least_seconds

USER = {"role": "user", "content": "Go."}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }
]
SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
PLAIN = "[{{ m.role }} {{ m.content }}]"
GENERIC = "{% for m in messages %}" + PLAIN + "{% endfor %}"
TURNS = {
    "silent": "{% if m.role in ['system', 'user', 'assistant'] %}" + PLAIN + "{% endif %}",
    "refusing": "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no') }}{% endif %}" + PLAIN,
    "upper": "[{{ m.role | upper }} {{ m.content }}]",
    "generic": PLAIN,
}


def assets_of(template: str, **fields: Any) -> ModelAssets:
    compiled = ChatTemplate(template, {})
    return ModelAssets(root="", tokenizer=NoTokenizer(), chat_template=compiled, eos_token_ids=(), **fields)


def render(template: str | ModelAssets, *messages: dict[str, Any], **fields: Any) -> str:
    body = ChatBody.model_validate({"messages": list(messages), "add_generation_prompt": False, **fields})
    assets = assets_of(template) if isinstance(template, str) else template
    return render_messages(body.messages, body.rendering({}), assets)


def render_response(template: str, items: list[dict[str, Any]], **fields: Any) -> str:
    chat = ResponsesBody.model_validate({"input": items, **fields}).chat
    return render_messages(chat.messages, chat.rendering({}), assets_of(template))


def of(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_developers_are_the_system_where_a_template_does_not_know_them(turns: str) -> None:
    template = "{% for m in messages %}" + turns + "{% endfor %}"
    as_system = render(template, of("system", "Rhyme."), USER)
    assert as_system.lower() == "[system rhyme.][user go.]"
    assert render(template, of("developer", "Rhyme."), USER) == as_system
    assert render_response(template, [of("developer", "Rhyme."), USER]) == as_system
    assert render(template, USER, of("developer", [{"type": "text", "text": "Now."}]), USER).lower() == (
        "[user go.][system now.][user go.]"
    )


def test_a_template_that_knows_developers_gets_them() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'developer' %}<dev>{{ m.content }}</dev>{% else %}"
        + PLAIN
        + "{% endif %}{% endfor %}"
    )
    assert render(template, of("developer", "A"), of("system", "B"), USER) == "<dev>A</dev>[system B][user Go.]"
    assert render_response(template, [of("developer", "A"), USER]) == "<dev>A</dev>[user Go.]"
    only = template.replace("{% else %}", "{% elif m.role != 'system' %}")
    assert render(only, of("system", "B"), USER) == "<dev>B</dev>[user Go.]"


FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}SPOT{% else %}" + PLAIN + "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("spot", ["", "{{ raise_exception('system first') }}"])
def test_later_instructions_move_to_the_top_where_only_those_are_shown(spot: str) -> None:
    template = FIRST_ONLY.replace("SPOT", spot)
    talk = [of("system", "A"), of("developer", "B"), USER, of("assistant", "Gone."), of("system", "C"), USER]
    assert render(template, *talk) == "<A\n\nB\n\nC>[user Go.][assistant Gone.][user Go.]"
    assert render(template, USER, of("developer", "B")) == "<B>[user Go.]"
    assert render_response(template, [of("developer", "B"), USER], instructions="A") == "<A\n\nB>[user Go.]"


NO_SYSTEM = {
    "refusing": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}" + PLAIN + "{% endfor %}",
    "silent": "{% for m in messages if m.role in ['user', 'assistant'] %}" + PLAIN + "{% endfor %}",
}


@pytest.mark.parametrize("template", NO_SYSTEM.values(), ids=NO_SYSTEM)
def test_what_needs_a_system_turn_is_in_the_first_users_where_there_is_none(template: str) -> None:
    assert render(template, of("developer", "Rhyme."), USER) == "[user Rhyme.\n\nGo.]"
    assert render(template, of("system", "Rhyme.")) == "[user Rhyme.]"
    prompt = render(template, of("system", "Rhyme."), USER, of("assistant", "Gone."), USER, tools=TOOLS)
    told, _, rest = prompt.rpartition("</tool_call>")
    assert told.startswith("[user Rhyme.\n\nYou can call functions.") and json.dumps(TOOLS[0]) in told
    assert rest == "\n\nGo.][assistant Gone.][user Go.]"
    call = call_of("1", '{"a": 1}')
    talk = [USER, {"role": "assistant", "tool_calls": [call]}, of("tool", "4"), of("assistant", "Four."), USER]
    assert "<tool_response>\n4\n</tool_response>][assistant Four.][user Go.]" in render(template, *talk, tools=TOOLS)
    response = render_response(template, [USER], instructions="Rhyme.", tools=[{"type": "function", "name": "add"}])
    assert response.startswith("[user Rhyme.\n\nYou can call") and '"add"' in response


def test_tools_are_told_where_a_template_mentions_but_does_not_show_them() -> None:
    prompt = render("{% if tools %}{% set n = 1 %}{% endif %}" + GENERIC, USER, tools=TOOLS)
    assert prompt.startswith("[system You can call functions.")
    shown = "{% for m in messages %}{% if m.tools %}{{ m.tools }}{% endif %}" + PLAIN + "{% endfor %}"
    assert (
        render(shown, of("developer", "Rhyme."), USER, tools=TOOLS) == f"{json.dumps(TOOLS)}[system Rhyme.][user Go.]"
    )


def call_of(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": f"f{name}", "arguments": arguments}}


def result_of(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"r{name}"}


def with_calls(shown: str, before: str = "") -> str:
    """A template that shows a message's calls and the results."""
    return (
        "{% for m in messages %}{% if m.tool_calls %}"
        + before
        + "{{ m.content }}"
        + shown
        + "{% elif m.role == 'tool' %}[{{ m.tool_call_id }}: {{ m.content }}]{% else %}"
        + PLAIN
        + "{% endif %}{% endfor %}"
        + SHOWS_TOOLS
    )


ONE = "({{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }})"
EACH = "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
REFUSES_MORE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"


@pytest.mark.parametrize("template", [with_calls(ONE), with_calls(EACH, REFUSES_MORE)], ids=["silent", "refusing"])
@pytest.mark.parametrize("names", ["12", "21", "123"])
def test_each_of_several_calls_is_shown_with_its_result_where_a_message_has_one(template: str, names: str) -> None:
    calls = [call_of(name, {"n": name}) for name in "123"[: len(names)]]
    talk = [USER, {"role": "assistant", "content": "Both.", "tool_calls": calls}, *map(result_of, names), USER]
    expected = "".join(f'(f{name} {{"n": "{name}"}})[{name}: r{name}]' for name in "123"[: len(names)])
    assert render(template, *talk) == f"[user Go.]Both.{expected}[user Go.]"


def test_several_calls_stay_together_where_a_template_shows_them() -> None:
    talk = [USER, {"role": "assistant", "tool_calls": [call_of("1", "{}"), call_of("2", "{}")]}]
    assert render(with_calls(EACH), *talk, result_of("2"), result_of("1")) == "[user Go.](f1 {})(f2 {})[2: r2][1: r1]"
    items = [{"type": "function_call", "call_id": n, "name": f"f{n}", "arguments": "{}"} for n in "12"]
    outputs = [{"type": "function_call_output", "call_id": n, "output": n} for n in "12"]
    assert render_response(with_calls(ONE), [USER, *items, *outputs]) == "[user Go.](f1 {})[1: 1](f2 {})[2: 2]"


JOINED = {
    "plus": "{% for c in m.tool_calls %}{{ '(' + c.function.name + ' ' + c.function.arguments + ')' }}{% endfor %}",
    "shown": "{% for c in m.tool_calls %}({{ c.function.name }} {{ c.function.arguments }}){% endfor %}",
}


@pytest.mark.parametrize("shown", JOINED.values(), ids=JOINED)
def test_arguments_are_text_where_a_template_joins_them_to_text(shown: str) -> None:
    texts = {'{"Stadt":  "Köln"}': '{"Stadt":  "Köln"}', "": "{}", '{"a": ': '{"a": '}
    for sent, seen in texts.items():
        assert render(with_calls(shown), USER, {"role": "assistant", "tool_calls": [call_of("1", sent)]}) == (
            f"[user Go.](f1 {seen})"
        )
    calls = [call_of("1", {"Stadt": "Köln"}), call_of("2", None)]
    prompt = render(with_calls(shown), USER, {"role": "assistant", "tool_calls": calls})
    assert prompt == '[user Go.](f1 {"Stadt": "Köln"})(f2 {})'
    item = {"type": "function_call", "call_id": "1", "name": "f1", "arguments": '{"b":2}'}
    assert render_response(with_calls(shown), [USER, item]) == '[user Go.](f1 {"b":2})'


OBJECTS = {
    "items": "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
    "json": "{{ m.tool_calls[0].function.arguments | tojson }}",
    "call as json": "{{ m.tool_calls[0].function | tojson }}",
    "either": "{% set a = m.tool_calls[0].function.arguments %}{{ a if a is string else a | tojson }}",
}


@pytest.mark.parametrize("shown", OBJECTS.values(), ids=OBJECTS)
def test_arguments_are_objects_where_a_template_reads_them_so(shown: str) -> None:
    sent = [USER, {"role": "assistant", "tool_calls": [call_of("1", '{"a":"b"}')]}]
    expected = ["[user Go.]a=b", '[user Go.]{"a": "b"}', '[user Go.]{"name": "f1", "arguments": {"a": "b"}}']
    assert render(with_calls(shown), *sent) in expected


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("where", ["true", "loop.last", "not loop.last", "m.tool_calls"])
def test_reasoning_reaches_the_field_that_a_template_reads(field: str, sent: str, where: str) -> None:
    template = f"{{% for m in messages %}}{{% if m.{field} and {where} %}}({{{{ m.{field} }}}}){{% endif %}}" + (
        PLAIN + "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}" + SHOWS_TOOLS
    )
    answer = {**of("assistant", "4"), sent: "Hm."}
    if where == "m.tool_calls":
        answer["tool_calls"] = [call_of("1", "{}")]
    talk = [USER, answer] if where == "loop.last" else [USER, answer, USER]
    assert "[user Go.](Hm.)[assistant 4]" in render(template, *talk)


def test_reasoning_is_shown_once_whatever_names_a_template_reads() -> None:
    both = "{% for m in messages %}{{ m.reasoning }}{{ m.thinking }}" + PLAIN + "{% endfor %}"
    answer = {**of("assistant", "4"), "reasoning_content": None, "reasoning": "Hm.", "thinking": ""}
    assert render(both, USER, answer) == "[user Go.]Hm.[assistant 4]"
    either = "{% for m in messages %}{{ m.reasoning or m.thinking }}" + PLAIN + "{% endfor %}"
    assert render(either, USER, {**answer, "reasoning": "", "thinking": "So."}) == "[user Go.]So.[assistant 4]"
    items = [USER, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}, of("assistant", "4")]
    assert render_response(both, items) == "[user Go.]Hm.[assistant 4]"
    with pytest.raises(BadRequestError, match=r"messages\.0\.reasoning must be a string"):
        render(GENERIC, {**answer, "reasoning": ["Hm."]})


DEMANDS = "{% if ID is not defined or ID | length != 9 %}{{ raise_exception('nine') }}{% endif %}({{ ID }})"
NINE = with_calls(
    "{% for c in m.tool_calls %}" + DEMANDS.replace("ID", "c.id") + "{{ c.function | tojson }}{% endfor %}"
)
NINE = NINE.replace("[{{ m.tool_call_id }}: ", DEMANDS.replace("ID", "m.tool_call_id") + "[")


def test_ids_have_nine_letters_where_a_template_demands_it() -> None:
    names = ["call_9f8e7d6c5b4a39281706f5e4", "x", "toolu_01-é", "kept12345"]
    talk = [USER, {"role": "assistant", "tool_calls": [call_of(name, "{}") for name in names]}]
    prompt = render(NINE, *talk, *map(result_of, reversed(names)))
    shown = re.findall(r"\(([A-Za-z0-9]{9})\)", prompt)
    assert shown == [*shown[:4], *reversed(shown[:4])] and len(set(shown)) == 4 and shown[3] == "kept12345"
    assert render(NINE, *talk, *map(result_of, reversed(names))) == prompt
    items = [{"type": "function_call", "call_id": "fc_1", "name": "f", "arguments": "{}"}]
    items.append({"type": "function_call_output", "call_id": "fc_1", "output": "4"})
    assert len(set(re.findall(r"\((\w{9})\)", render_response(NINE, [USER, *items])))) == 1
    assert "[call_1: rcall_1]" in render(with_calls(EACH), USER, result_of("call_1"))


def test_refusals_are_text() -> None:
    part = {"type": "refusal", "refusal": "I won't."}
    assert render(GENERIC, of("assistant", [part])) == "[assistant I won't.]"
    parts = [{"type": "output_text", "text": "Hm."}, part]
    assert render(GENERIC, {"role": "assistant", "content": parts}) == "[assistant Hm.\nI won't.]"
    assert render_response(GENERIC, [{"type": "message", "role": "assistant", "content": parts}]) == (
        "[assistant Hm.\nI won't.]"
    )
    for content, shown in ((None, "No."), ("Hm.", "Hm.\nNo.")):
        assert render(GENERIC, {"role": "assistant", "content": content, "refusal": "No."}) == f"[assistant {shown}]"
    assert render(GENERIC, {"role": "assistant", "content": "Yes.", "refusal": None}) == "[assistant Yes.]"
    for message in ({"content": [{"type": "refusal"}]}, {"refusal": 3}, {"content": [{"type": ["text"]}]}):
        with pytest.raises(BadRequestError, match=r"^messages\.0\.") as caught:
            render(GENERIC, {"role": "assistant", **message})
        assert caught.value.param == "messages"


@pytest.mark.parametrize("template", [GENERIC, with_calls(EACH), with_calls(JOINED["plus"])])
@pytest.mark.parametrize("depth", [60, 900, 5000])
def test_deep_arguments_are_taken_or_refused_by_name(template: str, depth: int) -> None:
    text = '{"a":' + "[" * depth + "]" * depth + "}"
    talk = [USER, {"role": "assistant", "tool_calls": [call_of("1", text)]}]
    try:
        assert "[" * depth in render(template, *talk, tools=TOOLS)
    except BadRequestError as error:
        assert depth > 60 and error.param == "messages"


def test_a_template_without_an_end_is_not_tried_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "_SECONDS", 0.1)
    monkeypatch.setattr(template_traits, "_SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = GENERIC + "{% if messages | length > 1 %}" + endless + "{% endif %}"
    assert ChatTemplate(source, {}).traits.tools_place == "none"
    assert least_seconds(lambda: ChatTemplate(source, {}).traits, enough=1) < 1


def test_a_request_with_tools_has_the_template_for_them() -> None:
    assets = assets_of(GENERIC, tool_template=ChatTemplate("<{{ tools[0].function.name }}>" + GENERIC, {}))
    assert render(assets, of("developer", "A"), USER, tools=TOOLS) == "<add>[system A][user Go.]"
    assert render(assets, USER) == render(assets, USER, tools=[]) == "[user Go.]"
