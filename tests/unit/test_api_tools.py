# SPDX-License-Identifier: Apache-2.0
"""The tools of a request: what is taken, what is refused by name and in bounded time, what the output must keep to."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from blink.api.openai.message_body import full_message, new_call_id
from blink.api.openai.message_form import message_form
from blink.api.openai.sampling import build_sampling_params
from blink.api.openai.schema import ChatBody
from blink.api.openai.tools import MAX_SCHEMAS_BYTES, MAX_TOOLS
from blink.api.serving.message_constraint import constrain_message
from blink.config import FrontendConfig
from blink.errors import BadRequestError
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuralTag, Tag
from blink.text.assets import ModelAssets, load_assets
from blink.text.conversation import flatten_messages
from blink.text.message.format_kinds import CallFormat, ReasoningFormat
from blink.text.message.formats import CALL_FORMATS, HERMES
from blink.text.message.parser import MessageForm
from blink.text.message.parts import CallOpened
from blink.text.message.reasoning_formats import REASONING_FORMATS
from blink.text.template import ChatTemplate
from blink.text.tokenizer import NoTokenizer
from blink.text.tool_prompt import put_tools_in_message, tell_tools
from cpu_seconds import least_seconds

MESSAGES = [{"role": "user", "content": "hi"}]
NO_ARGUMENTS: Any = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: Any = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def body_of(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": MESSAGES, **fields})


def choice_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [choice_of(name) for name in names]}}


@pytest.mark.parametrize(
    ("fields", "choice", "names", "parallel"),
    [
        ({"tools": [tool()]}, "auto", {"add"}, True),
        ({"tools": [tool()], "tool_choice": "auto", "parallel_tool_calls": False}, "auto", {"add"}, False),
        ({"tools": [tool(), tool("f.g-h_1")], "tool_choice": "required"}, "required", {"add", "f.g-h_1"}, True),
        ({"tools": [tool(), tool("f")], "tool_choice": choice_of("f")}, "named", {"f"}, False),
        ({"tools": [tool(), tool("f")], "tool_choice": allowed("auto", "f")}, "auto", {"f"}, True),
        (
            {"tools": [tool(), tool("f"), tool("g")], "tool_choice": allowed("required", "f", "g")},
            "required",
            {"f", "g"},
            True,
        ),
    ],
)
def test_what_may_and_must_be_called(fields: Any, choice: str, names: set[str], parallel: bool) -> None:
    use = body_of(**fields).tool_use
    assert use is not None
    assert (use.choice, use.names, use.parallel) == (choice, names, parallel)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}, {"tools": None}])
def test_nothing_is_called_without_tools_or_with_none(fields: Any) -> None:
    assert body_of(**fields).tool_use is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [tool(name="")]}, "tools"),
        ({"tools": [tool(name="a b")]}, "tools"),
        ({"tools": [tool(name='a"b')]}, "tools"),
        ({"tools": [tool(name="a" * 129)]}, "tools"),
        ({"tools": [tool(name=3)]}, "tools"),
        ({"tools": [tool(description=3)]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools"),
        ({"tools": [tool(strict="yes")]}, "tools"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(parameters={"description": "x" * MAX_SCHEMAS_BYTES})]}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": choice_of("other")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 3}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("auto", "add", "other")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("any", "add")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [3]}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_malformed_tools_are_refused_by_name_and_at_once(fields: Any, param: str) -> None:
    with pytest.raises((BadRequestError, ValidationError)) as caught:
        body_of(**fields)
    error = caught.value
    assert (error.param if isinstance(error, BadRequestError) else error.errors()[0]["loc"][0]) == param

    def read_again() -> None:
        with contextlib.suppress(BadRequestError, ValidationError):
            body_of(**fields)

    assert least_seconds(read_again, enough=2) < 2


def test_lone_surrogates_in_a_schema_are_no_fault_of_the_server() -> None:
    assert body_of(tools=[tool(parameters={"description": "\ud800"})]).tool_use is not None


def assets_of(calls: CallFormat | None = HERMES, reasoning: ReasoningFormat | None = None) -> ModelAssets:
    return ModelAssets(
        root="",
        tokenizer=NoTokenizer(),
        chat_template=None,
        eos_token_ids=(),
        call_format=calls,
        reasoning_format=reasoning,
    )


def tag_of(assets: ModelAssets, is_open: bool | None = None, **fields: Any) -> StructuralTag | None:
    """What the output of a request is constrained to."""
    body = body_of(**fields)
    form = message_form(body, assets, may_choose=True, is_reasoning_open=is_open)
    assert form is not None
    params = constrain_message(SamplingParams(), body.tool_use, form)
    assert params.skip_special_tokens is False
    tag = params.structured_outputs.structural_tag if params.structured_outputs is not None else None
    assert not isinstance(tag, str)
    return tag


def test_forced_calls_are_those_of_the_models_own_format() -> None:
    begin, end = '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"
    tools = [tool("f"), tool("g", parameters=None)]
    required = tag_of(assets_of(), tools=tools, tool_choice="required")
    assert required == StructuralTag(
        tags=[Tag(begin % "f", SCHEMA, end), Tag(begin % "g", NO_ARGUMENTS, end)], separator="\n"
    )
    named = tag_of(assets_of(), tools=tools, tool_choice=choice_of("f"))
    assert named == StructuralTag(tags=[Tag(begin % "f", SCHEMA, end)], separator="\n", max_tags=1)
    listed = tag_of(assets_of(CALL_FORMATS["mistral"]), tools=tools[:1], tool_choice="required")
    assert listed == StructuralTag(
        tags=[Tag('{"name": "f", "arguments": ', SCHEMA, "}")],
        prefix="[TOOL_CALLS] [",
        separator=", ",
        suffix="]",
    )


def test_calls_of_the_models_choice_are_constrained_from_their_marker_on() -> None:
    tag = tag_of(assets_of(), tools=[tool("f")], parallel_tool_calls=False)
    assert tag is not None
    assert (tag.trigger, tag.max_tags, tag.prefix) == ("<tool_call>", 1, "")
    assert tag.tags[0].begin.startswith(tag.trigger)
    # Where calls share a marker, only strict functions are worth giving up several of them.
    for name in ("llama3_json", "mistral", "phi4_mini_json"):
        assets = assets_of(CALL_FORMATS[name])
        assert tag_of(assets, tools=[tool("f")]) is None
        strict = tag_of(assets, tools=[tool("f", strict=True)])
        assert strict is not None
        assert strict.tags[0].begin.startswith(strict.trigger)


@pytest.mark.parametrize(
    ("name", "is_open", "tags"),
    [
        ("deepseek_r1", None, ("", "</think>")),
        ("deepseek_r1", False, ("", "")),
        ("qwen3", None, ("<think>", "</think>")),
        ("qwen3", True, ("", "</think>")),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [{"tools": [tool()], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}],
)
def test_forms_hold_behind_the_reasoning(name: str, is_open: bool | None, tags: Any, fields: Any) -> None:
    body, assets = body_of(**fields), assets_of(reasoning=REASONING_FORMATS[name])
    form = message_form(body, assets, may_choose=True, is_reasoning_open=is_open)
    assert form is not None
    params = constrain_message(build_sampling_params(body, {}), body.tool_use, form).structured_outputs
    assert params is not None
    assert (params.reasoning_start, params.reasoning_end) == tags


def test_an_answer_of_a_form_may_be_a_call_of_the_models_choice() -> None:
    body = body_of(tools=[tool()], response_format={"type": "json_object"})
    form = message_form(body, assets_of(), may_choose=True)
    assert form is not None
    params = constrain_message(build_sampling_params(body, {}), body.tool_use, form).structured_outputs
    assert params is not None and params.json_object and params.structural_tag is None
    assert params.calls == tag_of(assets_of(), tools=[tool()], tool_choice="required")


def test_a_forced_call_and_another_form_exclude_each_other() -> None:
    body = body_of(tools=[tool()], tool_choice="required", response_format={"type": "json_object"})
    form = message_form(body, assets_of(), may_choose=True)
    assert form is not None
    with pytest.raises(BadRequestError) as caught:
        constrain_message(build_sampling_params(body, {}), body.tool_use, form)
    assert caught.value.param == "tool_choice"


def test_what_the_model_cannot_choose_is_refused_with_what_to_do() -> None:
    with pytest.raises(BadRequestError, match="--tool-call-parser"):
        tag_of(assets_of(None), tools=[tool()])
    with pytest.raises(BadRequestError, match="--no-enable-auto-tool-choice"):
        message_form(body_of(tools=[tool()]), assets_of(), may_choose=False)
    assert tag_of(assets_of(None), tools=[tool()], tool_choice="required") is not None


def test_replies_are_read_by_the_schemas_of_the_tools() -> None:
    form = message_form(body_of(tools=[tool("f"), tool("g", parameters=None)]), assets_of(), may_choose=True)
    assert form is not None and form.schemas == {"f": SCHEMA, "g": NO_ARGUMENTS}


def test_ids_of_calls_go_on_where_the_template_shows_no_other_name() -> None:
    earlier = {"role": "assistant", "tool_calls": [CALL, CALL]}
    body = ChatBody.model_validate({"messages": [*MESSAGES, earlier, *MESSAGES], "tools": [tool()]})
    form = message_form(body, assets_of(CALL_FORMATS["kimi_k2"]), may_choose=True)
    assert form is not None
    assert new_call_id(form, "add", 1) == "functions.add:3"
    assert [call["id"] for call in full_message("assistant", [CallOpened("add")], form)["tool_calls"]] == [
        "functions.add:2"
    ]


def test_plain_chats_are_not_read_as_messages() -> None:
    assert message_form(body_of(), assets_of(), may_choose=True) is None
    form = message_form(
        body_of(include_reasoning=False), assets_of(reasoning=REASONING_FORMATS["qwen3"]), may_choose=True
    )
    without_calls = replace(REASONING_FORMATS["qwen3"], ends=())
    assert form == MessageForm(reasoning=without_calls, include_reasoning=False)


def test_the_parsers_that_flags_name_are_those_there_are() -> None:
    options = FrontendConfig.__dataclass_fields__
    assert set(options["tool_call_parser"].metadata["choices"]) == {"auto", *CALL_FORMATS}
    assert set(options["reasoning_parser"].metadata["choices"]) == {"auto", "none", *REASONING_FORMATS}


def test_the_flags_choose_the_parsers(tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}[TOOL_CALLS]")
    assert load_assets(FrontendConfig(chat_template=str(template))).call_format == CALL_FORMATS["mistral"]
    chosen = load_assets(
        FrontendConfig(chat_template=str(template), tool_call_parser="hermes", reasoning_parser="qwen3")
    )
    assert (chosen.call_format, chosen.reasoning_format) == (HERMES, REASONING_FORMATS["qwen3"])
    template.write_text("{{ tools }}")
    assert load_assets(FrontendConfig(chat_template=str(template))).call_format is None


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_earlier_calls_reach_the_template_as_objects() -> None:
    (flat,) = flatten_messages([{"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."}])
    assert flat["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (flat["content"], flat["reasoning_content"]) == ("", "Hm.")
    broken = {"id": "a", "function": {"name": "add", "arguments": '{"a": '}}
    assert flatten_messages([{"role": "assistant", "tool_calls": [broken]}])[0]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": ',
    }


@pytest.mark.parametrize(
    "calls", [3, [3], [{}], [{"function": {}}], [{"function": {"name": "f", "arguments": 3}}], {"function": 1}]
)
def test_malformed_earlier_calls_are_refused(calls: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        flatten_messages([{"role": "assistant", "tool_calls": calls}])
    assert caught.value.param == "messages"


def with_arguments(*arguments: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]} for text in arguments]


@pytest.mark.parametrize(
    "arguments",
    [
        ['{"a":[' + ",".join(["[]"] * (1 << 16)) + "]}"],
        ['{"a":[' + ",".join(["{}"] * (1 << 13)) + "]}"] * 9,
        ['{"a":[' + ",".join(["1"] * (1 << 19)) + "]}"] * 3,
    ],
    ids=["one call", "many calls", "numbers"],
)
def test_arguments_that_would_become_many_objects_are_refused_and_text_is_not(arguments: list[str]) -> None:
    with pytest.raises(BadRequestError, match="hold too much"):
        flatten_messages(with_arguments(*arguments))
    assert len(flatten_messages(with_arguments(*arguments), text_arguments=True)) == len(arguments)


def test_long_arguments_of_few_members_reach_the_template() -> None:
    text = "x" * (1 << 20)
    (flat,) = flatten_messages(with_arguments('{"a":"' + text + '"}'))
    assert flat["tool_calls"][0]["function"]["arguments"] == {"a": text}


def test_templates_say_where_they_look_for_tools() -> None:
    places = {"{{ tools }}": "variable", "{{ messages[0]['tools'] }}": "message", "{{ messages[0].tools }}": "message"}
    for source, place in {**places, "{{ messages }}": "none"}.items():
        assert ChatTemplate(source, {}).traits.tools_place == place


def test_templates_that_take_no_tools_are_told_in_words() -> None:
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("1", "2")]
    talk = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "tool_calls": [CALL]},
        *results,
    ]
    told = tell_tools(flatten_messages(talk), [tool()])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n") and json.dumps(tool()) in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert tell_tools(flatten_messages(MESSAGES), []) == MESSAGES


def test_phi4s_template_gets_its_tools_in_the_system_message() -> None:
    assert put_tools_in_message(MESSAGES, [tool()]) == [
        {"role": "system", "content": "", "tools": json.dumps([tool()])},
        *MESSAGES,
    ]
