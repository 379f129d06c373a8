# SPDX-License-Identifier: Apache-2.0
"""Chats and responses whose text is read as a message: the forms of OpenAI's API, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from blink.api.serving.session import Session
from blink.errors import BlinkError
from blink.region.layout import FinishReason
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation, Times
from blink.text.message.formats import CALL_FORMATS, HERMES
from blink.text.message.parser import MessageForm
from blink.text.message.reasoning_formats import REASONING_FORMATS
from blink.text.tokenizer import Tokenizer
from call_texts import NAMES, SCHEMAS, TEXTS
from played_generation import PlayedGeneration, reply_of
from small_tokenizer import load_small_assets

TEXT = (
    '<think>Two sums.</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)
FORM = MessageForm(reasoning=REASONING_FORMATS["qwen3"], calls=HERMES, names=frozenset({"add"}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_small_assets().tokenizer


class Play(PlayedGeneration):
    """A session in which a model writes a text, a character per token."""

    def __init__(
        self, tokenizer: Tokenizer, text: str, reason: FinishReason = FinishReason.STOP, **fields: Any
    ) -> None:
        params = SamplingParams(logprobs=0)
        self.generation = Generation(0, tokenizer, params, (2,))
        self._tokens = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
        self._reason = reason
        prompts = [SimpleNamespace(num_tokens=7, tokens=np.arange(3, 10, dtype=np.int32))]
        self._session = cast(Session, SimpleNamespace(generations=[self.generation], prompts=prompts))
        self._reply = reply_of(**{"message": FORM, "tokenizer": tokenizer, **fields})

    def _steps(self) -> Iterator[None]:
        for token in self._tokens[:-1]:
            self.generation.add_token(token, -0.5, 0)
            yield
        if self._reason == FinishReason.STOP:
            self.generation.add_token(self._tokens[-1], -0.5, 0)
            yield
            self.generation.add_token(2, -0.5, FinishReason.STOP)
        else:
            self.generation.add_token(self._tokens[-1], -0.5, self._reason)
        yield


def test_continuous_usage_counts_from_nothing_in_each_chunk(tokenizer: Tokenizer) -> None:
    chunks = Play(tokenizer, "Hello.", continuous_usage=True, include_usage=True, echoes=["Before."]).stream()
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:2]] == ["", "Before."]
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts[:3] == [0, 0, 1]
    assert counts == sorted(counts)
    assert all(usage["total_tokens"] == 7 + usage["completion_tokens"] for usage in usages)


def test_deltas_are_openais(tokenizer: Tokenizer) -> None:
    """The first delta of a call has its id, type and name, those behind it arguments alone; the last says why."""
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in Play(tokenizer, TEXT).stream()]
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    opened = [call for call in calls if "id" in call]
    assert [{**call, "id": ""} for call in opened] == [
        {"index": idx, "id": "", "type": "function", "function": {"name": "add", "arguments": ""}} for idx in (0, 1)
    ]
    assert len({call["id"] for call in opened}) == 2 and opened[0]["id"].startswith("call_")
    rest = [call for call in calls if "id" not in call]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    for idx, arguments in enumerate(('{"a": 1}', '{"a": 2}')):
        assert "".join(call["function"]["arguments"] for call in rest if call["index"] == idx) == arguments
    assert len(rest) > 10  # they stream
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two sums."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Two sums."
    assert "".join(delta.get("content", "") for delta in deltas) == "\n\nLet me see."
    assert (deltas[-1], chunks[-1].choices[0].finish_reason) == ({}, "tool_calls")
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None}


def test_the_whole_message_is_that_of_the_stream(tokenizer: Tokenizer) -> None:
    choice = Play(tokenizer, TEXT).whole()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"]) == ("\n\nLet me see.", "Two sums.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]


def test_reasoning_that_becomes_the_content_is_told_once_in_a_whole_message(tokenizer: Tokenizer) -> None:
    form = MessageForm(reasoning=REASONING_FORMATS["qwen3"], needs_content=True)
    message = Play(tokenizer, "<think>Four.", message=form).whole()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Four.", None)
    deltas = [chunk["choices"][0]["delta"] for chunk in Play(tokenizer, "<think>Four.", message=form).stream()]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Four."


def test_times_are_told_where_they_were_asked_for(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer, "Hi.", has_times=True, include_usage=True)
    play.generation.times = Times(arrived=1.0, admitted=1.25, first=1.5, ended=2.25)
    chunks = play.stream()
    (metrics,) = [chunk["metrics"] for chunk in chunks if "metrics" in chunk]
    assert chunks[-1]["metrics"] == metrics and chunks[-1]["usage"]
    num_tokens = play.generation.num_tokens
    expected = {"queue_time_ms": 250, "time_to_first_token_ms": 500, "generation_time_ms": 750}
    assert metrics == expected | {"mean_itl_ms": 750 / (num_tokens - 1), "tokens_per_second": num_tokens}
    assert "metrics" not in Play(tokenizer, "Hi.", has_times=True).whole()  # nobody has measured them
    assert all("metrics" not in chunk for chunk in Play(tokenizer, "Hi.").stream())


def test_without_content_it_is_null_and_without_anything_empty(tokenizer: Tokenizer) -> None:
    call = TEXT[TEXT.index("<tool_call>") :]
    assert Play(tokenizer, call).whole()["choices"][0]["message"]["content"] is None
    plain = Play(tokenizer, "Hi.").whole()["choices"][0]
    assert (plain["message"]["content"], plain["message"]["tool_calls"]) == ("Hi.", [])
    assert plain["finish_reason"] == "stop"
    assert Play(tokenizer, "\n", message=MessageForm(calls=HERMES)).whole()["choices"][0]["message"]["content"] == "\n"


def test_a_named_call_ends_with_stop_and_a_cut_one_with_length(tokenizer: Tokenizer) -> None:
    call = TEXT[TEXT.index("<tool_call>") :]
    named = MessageForm(calls=HERMES, is_named=True)
    assert Play(tokenizer, call, message=named).whole()["choices"][0]["finish_reason"] == "stop"
    cut = Play(tokenizer, call[:60], FinishReason.LENGTH).whole()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a"')


def test_every_logprob_is_told_once(tokenizer: Tokenizer) -> None:
    chunks = Play(tokenizer, TEXT, has_logprobs=True).stream()
    told = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in told) == TEXT + "<|im_end|>"


def test_the_whole_message_has_every_logprob(tokenizer: Tokenizer) -> None:
    choice = Play(tokenizer, TEXT, has_logprobs=True).whole()["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == TEXT + "<|im_end|>"


def test_mistrals_ids_are_what_its_template_takes(tokenizer: Tokenizer) -> None:
    form = MessageForm(calls=CALL_FORMATS["mistral"], names=frozenset({"add"}))
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {}}]'
    (call,) = Play(tokenizer, text, message=form).whole()["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "glm45"])
def test_typed_arguments_stream_as_they_are_whole(tokenizer: Tokenizer, name: str) -> None:
    """Arguments that are no JSON in the model's text are so in each API."""
    text, _, calls = next(each for each in TEXTS if each.format == name)[1:]
    form = MessageForm(calls=CALL_FORMATS[name], names=NAMES, schemas=SCHEMAS)
    whole = Play(tokenizer, text, message=form).whole()["choices"][0]["message"]
    functions = [call["function"] for call in whole["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
    deltas = [chunk["choices"][0]["delta"] for chunk in Play(tokenizer, text, message=form).stream()]
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == functions[0]["arguments"] and len(pieces) > 10
    assert "".join(delta.get("content") or "" for delta in deltas) == (whole["content"] or "")


ECHO = b'{"tools":[],"tool_choice":"auto","parallel_tool_calls":true}'


def test_a_response_streams_reasoning_text_and_calls_as_items(tokenizer: Tokenizer) -> None:
    events = Play(tokenizer, TEXT, echo=ECHO).stream()
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:  # OpenAI's own accumulation takes each of them
        state.handle_event(TypeAdapter(ResponseStreamEvent).validate_python(event))
    final = state._completed_response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[0].content[0].text == "Two sums."
    assert final.output_text == "\n\nLet me see."
    assert [(call.name, call.arguments) for call in final.output[2:]] == [("add", '{"a": 1}'), ("add", '{"a": 2}')]
    assert {item.status for item in final.output} == {"completed"}
    for kind, last in (("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        done = [event[last] for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == "".join(done) != ""


def test_the_whole_response_is_that_of_the_stream(tokenizer: Tokenizer) -> None:
    streamed = Play(tokenizer, TEXT, echo=ECHO).stream()[-1]["response"]
    whole = Play(tokenizer, TEXT, echo=ECHO).whole()
    without_ids = [
        [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
        for response in (streamed, whole)
    ]
    assert without_ids[0] == without_ids[1]
    assert streamed["usage"] == whole["usage"]
    # From the token that ends the opening tag to the one before that which ends the closing tag.
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(">Two sums.</think")


@pytest.mark.parametrize(("text", "count"), [(TEXT, len(">Two sums.</think")), ("No thoughts.", 0)])
def test_a_chats_usage_has_its_reasoning_tokens(tokenizer: Tokenizer, text: str, count: int) -> None:
    whole = Play(tokenizer, text).whole()["usage"]
    streamed = Play(tokenizer, text, include_usage=True).stream()[-1]["usage"]
    assert streamed == whole and whole["completion_tokens_details"] == {"reasoning_tokens": count}


def test_a_response_that_is_cut_is_incomplete(tokenizer: Tokenizer) -> None:
    whole = Play(tokenizer, "Once upon", FinishReason.LENGTH, echo=ECHO).whole()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"


def test_a_response_that_fails_ends_with_an_error_event(tokenizer: Tokenizer) -> None:
    play = Play(tokenizer, "x", echo=ECHO)
    data = play.encoder().encode_end(BlinkError("It broke."))
    assert data.startswith(b"event: error\ndata: ")
    event = json.loads(data.split(b"data: ")[1])
    assert (event["type"], event["message"], event["sequence_number"]) == ("error", "It broke.", 0)
