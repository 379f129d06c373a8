# SPDX-License-Identifier: Apache-2.0
"""Anthropic's API: what its conversations become, how its answers are written, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_api_messages import FORM, TEXT, Play

from blink.api.anthropic.schema import CountTokensBody, MessagesBody
from blink.config import FrontendConfig
from blink.errors import BlinkError
from blink.region.layout import FinishReason
from blink.text.assets import ModelAssets, load_assets
from blink.text.message.formats import HERMES
from blink.text.message.parser import MessageForm
from blink.text.message.reasoning_formats import REASONING_FORMATS
from fake_engine import FakeServer
from small_tokenizer import MODEL, load_small_assets

PATH = "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Tell.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
CONFIG = FrontendConfig(model=MODEL, region="test-anthropic", api_key=("secret",), max_body_bytes=20_000)
KEY = {"x-api-key": "secret"}


@pytest.fixture(scope="module")
def assets() -> ModelAssets:
    return load_assets(CONFIG)


@pytest.fixture(scope="module")
def server(assets: ModelAssets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    server = FakeServer(CONFIG, assets, tmp_path_factory.mktemp("anthropic"))
    yield server
    server.close()


def chat_of(**fields: Any) -> Any:
    return MessagesBody.model_validate({"messages": [USER], "max_tokens": 2000, **fields}).chat


def refusal_of(server: FakeServer, path: str = PATH, **fields: Any) -> dict[str, Any]:
    body = {"messages": [USER], **({"max_tokens": 9} if path == PATH else {}), **fields}
    response = server.post(path, body, headers=KEY)
    assert 400 <= response.status_code < 500, response.text
    told = response.json()
    assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
    assert told["request_id"].startswith("req_") and set(told["error"]) == {"type", "message"}
    return told["error"]


def test_a_conversation_of_blocks_is_a_chat() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "In Rome."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A call.", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "Let me see.", "citations": None},
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "broken", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Be brief."}]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert chat_of(messages=turns, system=system).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?\nIn Rome."},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "A call.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: broken"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "Well?"},
    ]


def test_fields_are_the_chats() -> None:
    chat = chat_of(
        max_tokens=3000,
        stop_sequences=["X"],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stream=True,
        seed=3,
        output_config={"effort": "xhigh", "format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "u"},
        service_tier="standard_only",
        context_management={"edits": []},
    )
    assert (chat.token_limit, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (3000, ["X"], 0.5, 0.25, 7)
    assert (chat.stream, chat.seed, chat.reasoning_effort) == (True, 3, "high")
    assert json.loads(chat.response_format.schema_text) == SCHEMA


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "weather"}, "named", False),
    ],
)
def test_tools_and_their_choice(choice: Any, expected: str, parallel: bool) -> None:
    use = chat_of(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}], tool_choice=choice).tool_use
    assert (use.choice, use.parallel, use.names) == (expected, parallel, {"weather"})


def test_no_tools_are_called_where_none_may_be_or_all_are_anthropics() -> None:
    assert chat_of(tools=[TOOL], tool_choice={"type": "none"}).tool_use is None
    assert chat_of(tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "auto"}).tool_use is None


@pytest.mark.parametrize(
    ("thinking", "kwargs", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, None, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, None, {"enable_thinking": False, "thinking": False}),
        ({"type": "disabled"}, {"thinking": True}, {"enable_thinking": False, "thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, None, None),
        (None, {"a": 1}, {"a": 1}),
    ],
)
def test_thinking_switches_templates(thinking: Any, kwargs: Any, expected: Any) -> None:
    chat = chat_of(thinking=thinking, chat_template_kwargs=kwargs)
    assert chat.chat_template_kwargs == expected
    assert chat.include_reasoning is (thinking is None or thinking["type"] != "disabled")


def test_a_beginning_of_the_answer_is_continued() -> None:
    chat = chat_of(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert chat.continue_final_message and not chat.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0: "),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]}, "odd"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{**USER, "name": "x"}]}, "messages.0.name"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "tool_use"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "last message"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"stop_sequences": "X"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 999}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tools": [{"input_schema": SCHEMA}]}, "name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0"),
        ({"tools": [{**TOOL, "odd": 1}]}, "odd"),
        ({"tools": [TOOL, TOOL]}, "tools.1"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "max_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n: Extra inputs"),
        ({"logprobs": True}, "logprobs: Extra inputs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_refusals_name_the_field(server: FakeServer, fields: Any, named: str) -> None:
    error = refusal_of(server, **fields)
    assert error["type"] == "invalid_request_error" and named in error["message"]


def test_lengths_are_told_in_the_words_that_clients_look_for(server: FakeServer) -> None:
    assert refusal_of(server, max_tokens=3000)["message"].startswith("input length and `max_tokens` exceed context")
    long = [{"role": "user", "content": "x " * 3000}]
    assert refusal_of(server, messages=long)["message"].startswith("prompt is too long: ")
    assert refusal_of(server, messages=long)["message"].endswith(" tokens > 2048 maximum")


def test_errors_have_the_types_of_their_status(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of(server, model="other")["type"] == "not_found_error"
    assert refusal_of(server, system="x" * 30_000)["type"] == "request_too_large"
    assert refusal_of(server, PATH + "/batches")["type"] == "not_found_error"
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "secret"}):
        response = server.post(PATH, {"messages": [USER], "max_tokens": 1}, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert server.send("GET", PATH, headers=KEY).json()["error"]["type"] == "invalid_request_error"
    monkeypatch.setattr(server.engine, "ready", False)
    monkeypatch.setattr(server.engine, "unavailable_reason", "it rests")
    response = server.post(PATH, {"messages": [USER], "max_tokens": 1}, headers=KEY)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    "headers",
    [KEY, {"Authorization": "Bearer secret"}, {"Authorization": "Bearer token", **KEY}],
)
def test_either_header_has_the_key(server: FakeServer, headers: dict[str, str]) -> None:
    headers = {**headers, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    answer = server.post(PATH + "?beta=true", {"messages": [USER], "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200 and answer.json()["role"] == "assistant"
    assert server.send("GET", "/v1/models", headers=headers).status_code == 200


def test_tokens_are_counted_as_the_answer_counts_them(server: FakeServer) -> None:
    body = {"messages": [USER], "system": "Be kind.", "tools": [TOOL], "tool_choice": {"type": "none"}}
    counted = server.post(PATH + "/count_tokens", body, headers=KEY).json()
    usage = server.post(PATH, {**body, "max_tokens": 1}, headers=KEY).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    long = [{"role": "user", "content": "x " * 3000}]  # more than the context has room for: clients ask before
    assert server.post(PATH + "/count_tokens", {"messages": long}, headers=KEY).json()["input_tokens"] > 2048
    assert "max_tokens" in refusal_of(server, PATH + "/count_tokens", max_tokens=3)["message"]
    assert CountTokensBody.model_validate({"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 9999}})


def play(text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Play:
    return Play(load_small_assets().tokenizer, text, reason, **{"shows_thinking": True, **fields})


def gather(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream, and check the order of its events."""
    first, ping, *events, delta, last = events
    assert (first["type"], ping, last) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message, texts = first["message"], dict[int, list[str]]()
    names = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    assert message["content"] == [] and message["stop_reason"] is None
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"]) and not texts
            message["content"].append(event["content_block"])
            texts[event["index"]] = []
            continue
        block = message["content"][-1]
        assert event["index"] == len(message["content"]) - 1 and event["index"] in texts
        if event["type"] == "content_block_stop":
            text = "".join(texts.pop(event["index"]))
            value = {"tool_use": lambda text=text: {"input": json.loads(text)}}
            block.update(value.get(block["type"], lambda text=text, block=block: {block["type"]: text})())
        elif event["delta"]["type"] == "signature_delta":
            block["signature"] = event["delta"]["signature"]
        else:
            assert event["delta"]["type"] == f"{'input_json' if block['type'] == 'tool_use' else block['type']}_delta"
            texts[event["index"]].append(event["delta"][names[block["type"]]])
    assert not texts and delta["type"] == "message_delta"
    assert delta["usage"].items() >= {"input_tokens": 7, "cache_read_input_tokens": 0}.items()
    return message | delta["delta"] | {"usage": delta["usage"] | {"service_tier": "standard"}}


def without_chance(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in message["content"]]
    return {**message, "content": blocks}


def test_a_stream_has_blocks_of_reasoning_text_and_calls() -> None:
    streamed, whole = gather(play(TEXT).stream()), play(TEXT).whole()
    assert without_chance(streamed) == without_chance(whole)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0]["thinking"] == "Two sums." and whole["content"][0]["signature"]
    assert whole["content"][1] == {"type": "text", "text": "\n\nLet me see."}
    assert [(block["name"], block["input"]) for block in whole["content"][2:]] == [("add", {"a": 1}), ("add", {"a": 2})]
    ids = {block["id"] for block in whole["content"][2:]}
    assert len(ids) == 2 and all(name.startswith("toolu_") for name in ids)
    assert (whole["stop_reason"], whole["stop_sequence"], whole["role"]) == ("tool_use", None, "assistant")
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == len(">Two sums.</think")


def test_a_named_call_ends_with_tool_use_too() -> None:
    form = MessageForm(calls=HERMES, names=frozenset({"add"}), is_named=True)
    assert play(TEXT[TEXT.index("<tool_call>") :], message=form).whole()["stop_reason"] == "tool_use"


def test_reasoning_is_hidden_but_signed_where_it_is_omitted() -> None:
    whole = play(TEXT, shows_thinking=False).whole()
    assert whole["content"][0]["thinking"] == "" and whole["content"][0]["signature"]
    events = play(TEXT, shows_thinking=False).stream()
    assert "thinking_delta" not in json.dumps(events) and gather(events)["content"][1]["text"] == "\n\nLet me see."


@pytest.mark.parametrize("text", ["Once upon", "<think>Hm"])
def test_what_is_cut_ends_with_max_tokens(text: str) -> None:
    form = MessageForm(reasoning=REASONING_FORMATS["qwen3"])
    message = gather(play(text, FinishReason.LENGTH, message=form).stream())
    assert message["stop_reason"] == "max_tokens" and len(message["content"]) == 1


def test_a_call_that_is_cut_has_no_input() -> None:
    cut = TEXT[TEXT.index("<tool_call>") :][:46]
    whole = play(cut, FinishReason.LENGTH).whole()
    assert (whole["content"][0]["name"], whole["content"][0]["input"]) == ("add", {})
    assert whole["stop_reason"] == "max_tokens"


def test_an_answer_without_text_has_no_blocks() -> None:
    form = MessageForm(calls=FORM.calls, names=FORM.names)
    played = play("x", message=form)
    played._tokens = []
    played._steps = lambda: iter([played.generation.add_token(2, -0.5, FinishReason.STOP)])
    assert played.whole()["content"] == []


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    played = play("x", id="msg_9")
    data = played.encoder().encode_end(BlinkError("It broke."))
    assert data.startswith(b"event: error\ndata: ") and data.endswith(b"\n\n")
    error = {"type": "api_error", "message": "It broke."}
    assert json.loads(data.split(b"data: ")[1]) == {"type": "error", "error": error, "request_id": "req_9"}
