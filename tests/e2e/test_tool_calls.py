# SPDX-License-Identifier: Apache-2.0
"""Tool calls against real processes, by OpenAI's own client. The model knows no language: it calls what it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError

from blink.models.weights.files import default_model_path
from processes import Engine, Frontend, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
MESSAGES: Any = [{"role": "user", "content": "How warm is it in Paris and in Rome?"}]
UNITS = ["celsius", "fahrenheit"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": UNITS}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "temperature", "description": "Measure.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "temperature"}}
RESPONSE_TOOLS: Any = [{"type": "function", **TOOLS[0]["function"], "strict": True}]
END = "2"  # the end of a message; likely as soon as it may come


@pytest.fixture
def server(tiny_server: Frontend) -> Frontend:
    return tiny_server


def ask(server: Frontend, **fields: Any) -> Any:
    options: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 120}
    options |= {"logit_bias": {END: 100}, **fields}
    extra = {"min_tokens": options.pop("min_tokens", 0)}
    return server.client.chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, extra_body=extra, **options
    )


def arguments_of(call: Any) -> Any:
    return json.loads(call.function.arguments)


def accumulate(chunks: Any) -> tuple[list[dict[str, str]], str | None]:
    """The calls of a stream, put together as clients do, and why it ended."""
    calls: list[dict[str, str]] = []
    reason = None
    for chunk in chunks:
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id is not None:
                assert (delta.index, delta.type) == (len(calls), "function")
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments
    return calls, reason


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_forced_call_is_made_with_arguments_of_its_schema(server: Frontend, choice: Any, reason: str) -> None:
    whole = ask(server, tool_choice=choice).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.finish_reason, whole.message.content) == ("temperature", reason, None)
    assert arguments_of(call)["city"] in ("Paris", "Rome") and arguments_of(call)["unit"] in UNITS
    calls, streamed_reason = accumulate(ask(server, tool_choice=choice, stream=True))
    assert [(made["name"], made["arguments"]) for made in calls] == [("temperature", call.function.arguments)]
    assert streamed_reason == reason


def test_requests_that_another_process_reads_call_too(server: Frontend) -> None:
    """Bodies that are much work are read beside the server: what they say of tools comes back."""
    padding = "x" * 200_000
    chat = ask(server, user=padding).choices[0].message
    assert chat.tool_calls[0].function.arguments == ask(server).choices[0].message.tool_calls[0].function.arguments
    response = server.client.responses.create(
        model=server.model,
        input="How warm is it?",
        tools=RESPONSE_TOOLS,
        tool_choice="required",
        user=padding,
        extra_body={"logit_bias": {END: 100}},
    )
    assert response.output[0].type == "function_call"
    assert (response.tools[0].type, response.user) == ("function", padding)


def test_calls_are_parallel_unless_that_is_forbidden(server: Frontend) -> None:
    whole = ask(server, tools=TOOLS, min_tokens=80, max_tokens=400).choices[0]
    assert len(whole.message.tool_calls) > 1
    assert {call.function.name for call in whole.message.tool_calls} <= {"temperature", "now"}
    calls, reason = accumulate(ask(server, tools=TOOLS, min_tokens=80, max_tokens=400, stream=True))
    assert [call["arguments"] for call in calls] == [call.function.arguments for call in whole.message.tool_calls]
    assert len({call["id"] for call in calls}) == len(calls)
    assert reason == whole.finish_reason
    assert len(ask(server, parallel_tool_calls=False, max_tokens=400).choices[0].message.tool_calls) == 1


def test_the_clients_helpers_parse_the_arguments(server: Frontend) -> None:
    options: Any = {"model": server.model, "messages": MESSAGES, "tool_choice": "required", "max_tokens": 120}
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    parsed = server.client.chat.completions.parse(tools=strict, logit_bias={END: 100}, temperature=0, **options)
    calls: Any = parsed.choices[0].message.tool_calls
    assert calls is not None and set(calls[0].function.parsed_arguments) == {"city", "unit"}
    with server.client.chat.completions.stream(tools=strict, logit_bias={END: 100}, temperature=0, **options) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [calls[0].function.parsed_arguments]


def test_without_need_the_answer_is_text(server: Frontend) -> None:
    for choice in ("auto", "none"):
        message = ask(server, tool_choice=choice, tools=TOOLS, logit_bias={}, max_tokens=8).choices[0].message
        assert message.content and not message.tool_calls


def test_a_call_of_the_models_choice_is_told_from_its_text(server: Frontend) -> None:
    call = '<tool_call>\n{"name": "temperature", "arguments": {"city": "Rome", "unit": "celsius"}}\n</tool_call>'
    body: Any = {"messages": MESSAGES, "tools": TOOLS, "structured_outputs": {"choice": [f"Let me see.\n{call}"]}}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "temperature", "arguments": '{"city": "Rome", "unit": "celsius"}'}
    body["tool_choice"] = "none"
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"Let me see.\n{call}", "stop")


def test_an_answer_in_json_may_be_a_call_instead(server: Frontend) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    tag = server.post("/tokenize", prompt="<tool_call>", add_special_tokens=False).json()["tokens"][0]
    called = ask(server, tool_choice="auto", response_format=form, logit_bias={END: 100, str(tag): 100}).choices[0]
    assert arguments_of(called.message.tool_calls[0])["unit"] in UNITS and called.message.content is None
    answered = ask(server, tool_choice="auto", response_format=form, logit_bias={END: 100, str(tag): -100}).choices[0]
    assert json.loads(answered.message.content)["unit"] in UNITS and not answered.message.tool_calls


@pytest.fixture(scope="module")
def reasoning_server(tiny_engine: Engine) -> Iterator[Frontend]:
    flags = [f"--tokenizer={default_model_path()}", "--reasoning-parser=deepseek_r1"]
    frontend = start_frontend(tiny_engine.region, *flags, "--no-enable-auto-tool-choice")
    yield frontend
    stop(frontend.process)


def test_reasoning_stands_apart(reasoning_server: Frontend) -> None:
    body: Any = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    message = reasoning_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] == message["reasoning"] != ""
    response = reasoning_server.client.responses.create(
        model=reasoning_server.model, input=MESSAGES[0]["content"], max_output_tokens=8, temperature=0
    )
    assert [item.type for item in response.output] == ["reasoning"] and response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 8
    silent = reasoning_server.post("/v1/chat/completions", **body, include_reasoning=False).json()
    assert silent["choices"][0]["message"]["reasoning_content"] is None
    # A prompt that closes the reasoning leaves none to the reply.
    closed = [*MESSAGES, {"role": "assistant", "content": "<think></think>"}]
    body |= {"messages": closed, "add_generation_prompt": False, "continue_final_message": True}
    message = reasoning_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["content"] and message["reasoning_content"] is None
    forced = reasoning_server.post(
        "/v1/chat/completions", **body | {"max_tokens": 120, "tools": TOOLS[:1], "tool_choice": NAMED}
    )
    assert forced.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "temperature"


def test_an_operator_may_forbid_the_models_choice(reasoning_server: Frontend) -> None:
    refused = reasoning_server.post("/v1/chat/completions", messages=MESSAGES, tools=TOOLS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_n_replies_call_each_for_itself(server: Frontend) -> None:
    choices = ask(server, n=2).choices
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["temperature"] * 2
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id


def test_a_conversation_with_results_goes_on(server: Frontend) -> None:
    message = ask(server).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20"}
    messages: Any = [*MESSAGES, message.model_dump(), result]
    reply = server.client.chat.completions.create(model=server.model, messages=messages, tools=TOOLS, max_tokens=8)
    assert reply.choices[0].finish_reason in ("length", "stop")
    assert reply.usage is not None and reply.usage.prompt_tokens > 100


def test_responses_call_too(server: Frontend) -> None:
    options: Any = {"model": server.model, "input": "How warm is it?", "tools": RESPONSE_TOOLS, "temperature": 0}
    options |= {"tool_choice": {"type": "function", "name": "temperature"}, "max_output_tokens": 120}
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [options["tool_choice"]]}
    for choice in (options["tool_choice"], chosen):
        options["tool_choice"] = choice
        response = server.client.responses.create(**options, extra_body={"logit_bias": {END: 100}})
        assert response.output[0].type == "function_call"
    call = response.output[0]
    assert call.type == "function_call" and call.name == "temperature"
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    with server.client.responses.stream(**options, extra_body={"logit_bias": {END: 100}}) as stream:
        final = stream.get_final_response()
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments]
    assert final.tools[0].name == "temperature"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "parameters", [{"type": "object", "properties": {"a": {"type": "strange"}}}, {"$ref": "https://elsewhere/schema"}]
)
def test_what_cannot_be_kept_to_is_refused_where_it_must_be(server: Frontend, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(BadRequestError) as caught:
        ask(server, tools=tools)
    assert caught.value.param == "tools"
    assert ask(server, tools=tools, tool_choice="auto").choices[0].message.tool_calls is not None
