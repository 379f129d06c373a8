# SPDX-License-Identifier: Apache-2.0
"""Tools of /v1/responses that are no functions: those of other servers, of a namespace, and with a text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_api_messages import ECHO, FORM, TEXT, Play

from blink.api.openai.responses.schema import ResponsesBody
from blink.api.openai.responses.tools import Origin
from blink.errors import BadRequestError
from blink.region.layout import FinishReason
from blink.text.message.formats import HERMES
from blink.text.message.parser import MessageForm
from small_tokenizer import load_small_assets

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: HUNK+"},
}
SPACE = {"type": "namespace", "name": "mcp__disk", "description": "A disk.", "tools": [ADD, PATCH]}
HOSTED = ["web_search", "local_shell", "mcp", "image_generation", "code_interpreter", "file_search", "tool_search"]


def chat_of(**fields: Any) -> Any:
    return ResponsesBody.model_validate({"input": "Hi", **fields}).chat


def test_tools_of_other_servers_are_passed_over() -> None:
    chat = chat_of(tools=[*({"type": kind} for kind in HOSTED), ADD], tool_choice="auto")
    assert chat.tool_use.names == {"add"}
    assert chat_of(tools=[{"type": kind} for kind in HOSTED], tool_choice="auto").tool_use is None


def test_a_namespace_is_flattened_and_a_text_is_an_argument() -> None:
    body = ResponsesBody.model_validate({"input": "Hi", "tools": [SPACE, PATCH, ADD]})
    assert body.chat.tool_use is not None
    assert body.chat.tool_use.names == {"mcp__disk__add", "mcp__disk__apply_patch", "apply_patch", "add"}
    assert body.origins == {
        "mcp__disk__add": Origin("add", "mcp__disk"),
        "mcp__disk__apply_patch": Origin("apply_patch", "mcp__disk", is_custom=True),
        "apply_patch": Origin("apply_patch", None, is_custom=True),
    }
    (function,) = [tool["function"] for tool in body.chat.tools or () if tool["function"]["name"] == "apply_patch"]
    assert list(function["parameters"]["properties"]) == ["input"]
    assert function["description"].startswith("Patch files.\n") and "start: HUNK+" in function["description"]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "add", "namespace": "mcp__disk"}, "mcp__disk__add"),
        ({"type": "function", "name": "mcp__disk__add"}, "mcp__disk__add"),
    ],
)
def test_they_can_be_chosen(choice: Any, name: str) -> None:
    use = chat_of(tools=[SPACE, PATCH], tool_choice=choice).tool_use
    assert (use.choice, use.names) == ("named", {name})
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    assert chat_of(tools=[SPACE, PATCH], tool_choice=allowed).tool_use.names == {name}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "x"}]},
        {"tools": [{"type": "namespace", "name": "x"}]},
        {"tools": [{"type": "namespace", "tools": []}]},
        {"tools": [{"type": "namespace", "name": "x", "tools": [3]}]},
        {"tools": [{"type": "custom"}]},
        {"tools": [PATCH, {**ADD, "name": "apply_patch"}]},
        {"tools": [{"type": "namespace", "name": "a b", "tools": [ADD]}]},
    ],
)
def test_malformed_ones_are_refused(fields: Any) -> None:
    with pytest.raises(BadRequestError) as refusal:
        chat_of(**fields)
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("choice", ["required", {"type": "web_search"}])
def test_a_call_of_what_is_passed_over_cannot_be_forced(choice: Any) -> None:
    with pytest.raises(BadRequestError) as refusal:
        chat_of(tools=[{"type": "web_search"}], tool_choice=choice)
    assert refusal.value.param == "tool_choice"


def test_earlier_calls_and_results_are_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '+"a"'},
        {"type": "function_call", "call_id": "c2", "name": "add", "namespace": "mcp__disk", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    _, answer, *results = chat_of(input=items).messages
    functions = [call["function"] for call in answer["tool_calls"]]
    assert [function["name"] for function in functions] == ["apply_patch", "mcp__disk__add"]
    assert json.loads(functions[0]["arguments"]) == {"input": '+"a"'}
    assert [(message["role"], message["tool_call_id"]) for message in results] == [("tool", "c1"), ("tool", "c2")]


@pytest.mark.parametrize(
    "item",
    [{"type": "custom_tool_call", "call_id": "c", "name": "p", "input": 3}, {"type": []}, {"type": "shell_call"}],
)
def test_items_that_say_nothing_are_refused(item: Any) -> None:
    with pytest.raises(BadRequestError) as refusal:
        chat_of(input=[item])
    assert refusal.value.param == "input"


def test_the_body_of_codex_is_taken() -> None:
    body = ResponsesBody.model_validate(
        {
            "model": "m",
            "instructions": "You are a coding agent.",
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]}],
            "tools": [ADD, PATCH, SPACE, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0192",
            "text": {"verbosity": "low"},
            "client_metadata": {"x": "y"},
        }
    )
    assert body.chat.stream and body.chat.tool_use is not None and not body.chat.tool_use.parallel


def play(text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Play:
    return Play(load_small_assets().tokenizer, text, reason, **{"echo": ECHO, **fields})


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ORIGINS = {"apply_patch": Origin("apply_patch", None, is_custom=True), "disk__add": Origin("add", "disk")}
CALLS = MessageForm(calls=HERMES, names=frozenset(ORIGINS))


def test_calls_are_told_as_those_of_the_tools() -> None:
    text = call_text("apply_patch", input='+"a"\n') + "\n" + call_text("disk__add", a=1)
    whole = play(text, message=CALLS, origins=ORIGINS).whole()
    custom, call = whole["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", '+"a"\n')
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "add", "disk")
    assert json.loads(call["arguments"]) == {"a": 1} and custom["id"].startswith("ctc_")
    events = play(text, message=CALLS, origins=ORIGINS).stream()
    told = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [event["type"].rpartition(".")[2] for event in told] == ["delta", "done"]
    assert told[0]["delta"] == told[1]["input"] == '+"a"\n' and "arguments" not in told[1]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["custom_tool_call", "function_call"]


def test_a_text_that_is_cut_is_told_as_it_is() -> None:
    text = call_text("apply_patch", input="+abc")[:-20]
    (item,) = play(text, FinishReason.LENGTH, message=CALLS, origins=ORIGINS).whole()["output"]
    assert item["input"].startswith('{"input') and item["status"] == "incomplete"


def test_the_logprobs_of_the_text_are_told_once() -> None:
    whole = play(TEXT, has_logprobs=True, message=FORM).whole()
    (part,) = next(item for item in whole["output"] if item["type"] == "message")["content"]
    text = "".join(entry["token"] for entry in part["logprobs"])
    assert text.rstrip() == part["text"] == "\n\nLet me see."
    assert {"token", "logprob", "bytes", "top_logprobs"} == set(part["logprobs"][0])
    events = play(TEXT, has_logprobs=True, message=FORM).stream()
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    (added,) = [e for e in events if e["type"] == "response.content_part.added" and "logprobs" in e["part"]]
    assert added["part"]["logprobs"] == []


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"top_logprobs": -1}, {"top_logprobs": 99}])
def test_logprobs_are_asked_for_by_include(fields: Any) -> None:
    with pytest.raises(Exception, match="top_logprobs"):
        chat_of(**fields)
    chat = chat_of(include=["message.output_text.logprobs"], top_logprobs=3)
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
    assert chat_of(include=["message.output_text.logprobs"]).top_logprobs_count == 0


def test_the_tokens_of_prompt_and_output_are_told_where_they_were_asked_for() -> None:
    played = play("Hi.", shows_messages=True, message=MessageForm())
    whole, tokenizer = played.whole(), load_small_assets().tokenizer
    (given,), (made,) = whole["input_messages"], whole["output_messages"]
    assert given["tokens"] == list(range(3, 10)) and made["message"].startswith("Hi.")
    for message in (given, made):
        assert message["type"] == "raw_message_tokens"
        assert message["message"] == tokenizer.decode(message["tokens"], skip_special_tokens=False)
    assert len(made["tokens"]) == played.generation.num_tokens
    assert "input_messages" not in play("Hi.", message=MessageForm()).whole()
