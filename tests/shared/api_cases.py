# SPDX-License-Identifier: Apache-2.0
"""Requests to every endpoint, right and wrong ones, and what the engine says to each: their answers are recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, OLLAMA, COMPLETION = "/v1/messages", "/api/chat", "/completion"
_GENERATING = (COMPLETIONS, CHAT, RESPONSES)

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_USER = {"role": "user", "content": "Hi there"}
_FUNCTION = {"name": "add", "description": "Add.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_FLAT_TOOLS = [{"type": "function", **_FUNCTION}]
_NAMED = {"type": "function", "function": {"name": "add"}}
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": _SCHEMA}}
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
_ORDER = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
_RESULTS = [
    _USER,
    {"role": "assistant", "tool_calls": _ORDER},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]
_HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four é.<|return|>",
    "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
)


@dataclass(frozen=True)
class Case:
    """One request. server: the kind of server that it is sent to. replies: what the engine makes of each sequence."""

    server: str
    method: str
    path: str
    content: str = ""
    replies: tuple[str, ...] = ("Hello there! 👩.",)
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def key(self) -> str:
        """Return what tells it from the others."""
        defaults = vars(Case("", "", ""))
        return json.dumps({name: value for name, value in vars(self).items() if value != defaults[name]})


def list_cases() -> list[Case]:
    """Return all requests, each once."""
    made = (
        _completions,
        _chats,
        _older_forms,
        _batches,
        _rendered,
        _named_logprobs,
        _responses,
        _messages,
        _blocks,
        _ollama,
        _ollama_refusals,
        _llama_cpp,
        _aliases,
        _pooling,
        _adapters,
        _tokens,
        _wrong_bodies,
        _wrong_prompts,
        _other_paths,
        _guarded,
        _admin,
        _engineless,
    )
    return list({case.key: case for cases in made for case in cases()}.values())


def _post(server: str, path: str, body: Any, **options: Any) -> Case:
    return Case(
        server, "POST", path, body if isinstance(body, str) else json.dumps(body, ensure_ascii=False), **options
    )


def _both(server: str, path: str, body: Mapping[str, Any], **options: Any) -> Iterator[Case]:
    """Yield a request for a whole answer, and for a stream."""
    yield _post(server, path, body, **options)
    yield _post(server, path, {**body, "stream": True}, **options)


def _completions() -> Iterator[Case]:
    two = ("Yes. One fish", "No")
    for fields in (
        {},
        {"max_tokens": None, "model": "m"},
        {"n": 2, "seed": 1},
        {"prompt": ["One", "Two fish"], "n": 2, "max_tokens": 4},
        {"prompt": [5, 6, 7]},
        {"prompt": [[5, 6], [7]], "echo": True},
        {"echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"echo": True, "logprobs": 2, "max_tokens": 2},
        {"logprobs": 0, "max_tokens": 3},
        {"logprobs": 3, "n": 2, "max_tokens": 2},
        {"logprobs": 2, "max_tokens": 2, "return_tokens_as_token_ids": True},
        {"stop": "there"},
        {"stop": ["xyz", "!"], "include_stop_str_in_output": True},
        {"stop_token_ids": [2], "include_stop_str_in_output": True, "ignore_eos": True},
        {"return_token_ids": True, "max_tokens": 2},
        {"return_token_ids": True, "echo": True, "n": 2, "max_tokens": 1},
        {"truncate_prompt_tokens": 1},
        {"structured_outputs": {"choice": ["Yes", "No"]}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"response_format": _JSON_SCHEMA},
        {"response_format": {"type": "json_object"}, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1},
        {"request_id": "mine", "user": "me", "unknown": 1, "service_tier": "flex"},
    ):
        yield from _both("plain", COMPLETIONS, {"prompt": "Hello", **fields}, replies=two if "n" in fields else _ONE)
    for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        body = {"prompt": "Hello", "stream": True, "stream_options": options, "n": 2, "echo": True, "max_tokens": 3}
        yield _post("plain", COMPLETIONS, body)
    yield _post("plain", COMPLETIONS, {"prompt": ["A fish", "Two"], "prompt_logprobs": 1, "n": 2, "max_tokens": 1})
    yield _post(
        "plain", COMPLETIONS, {"prompt": "Hello", "use_beam_search": True, "n": 2, "max_tokens": 2, "logprobs": 1}
    )


_ONE = Case("", "", "").replies


def _chats() -> Iterator[Case]:
    for fields in (
        {},
        {"max_tokens": 2},
        {"max_completion_tokens": 3, "max_tokens": 9},
        {"n": 2, "max_tokens": 3},
        {"logprobs": True, "max_tokens": 2},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 2, "return_tokens_as_token_ids": True},
        {"return_token_ids": True, "max_tokens": 2},
        {"response_format": _JSON_SCHEMA},
        {"stop": ["there"], "request_id": "c"},
        {
            "add_generation_prompt": False,
            "continue_final_message": True,
            "messages": [_USER, {"role": "assistant", "content": "So"}],
        },
        {"add_generation_prompt": False},
        {"tools": _TOOLS, "tool_choice": _NAMED},
        {"tools": _TOOLS, "tool_choice": "none"},
        {"tools": [], "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    ):
        yield from _both(
            "plain", CHAT, {"messages": [_USER], **fields}, replies=(_CALL,) if "tools" in fields else _ONE
        )
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        body = {"messages": [_USER], "stream": True, "stream_options": options, "max_tokens": 3}
        yield _post("plain", CHAT, body)
        yield _post("tools", CHAT, {**body, "max_tokens": 30}, replies=("No.</think>Yes.",))
    yield _post("plain", CHAT, {"messages": [_USER], "prompt_logprobs": 0, "max_tokens": 1})


def _older_forms() -> Iterator[Case]:
    """Yield chats with functions instead of tools."""
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [_USER, called, {"role": "function", "name": "add", "content": "2"}]
    for fields in (
        {},
        {"function_call": "auto", "messages": talk},
        {"function_call": {"name": "add"}},
        {"function_call": "none"},
    ):
        body = {"messages": [_USER], "functions": [_FUNCTION], **fields}
        yield from _both("tools", CHAT, body, replies=("Hm.</think>I add. " + _CALL,))
    for wrong in ({"function_call": {"name": "add"}}, {"functions": 3}, {"functions": [_FUNCTION], "tools": _TOOLS}):
        yield _post("tools", CHAT, {"messages": [_USER], **wrong})
    yield _post("tools", CHAT, {"messages": [_USER], "functions": [_FUNCTION], "function_call": {"name": "sub"}})


def _batches() -> Iterator[Case]:
    """Yield several conversations in one request."""
    path, chats = CHAT + "/batch", [[_USER], [{"role": "user", "content": "And you?"}]]
    two = ("Yes. One fish", "No")
    for fields in (
        {},
        {"max_tokens": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        {"response_format": _JSON_SCHEMA, "request_id": "mine"},
        {"stream": True},
        {"n": 2},
        {"tools": _TOOLS},
        {"messages": []},
        {"messages": [[_USER], []]},
        {"messages": [_USER]},
        {"temperature": "hot"},
    ):
        yield _post("plain", path, {"messages": chats, **fields}, replies=two)
    yield _post("away", path, {"messages": chats})
    yield _post("tools", path, {"messages": chats}, replies=("Hm.</think>Yes.", "No.</think>One."))


def _rendered() -> Iterator[Case]:
    """Yield requests whose prompt alone is wanted."""
    for fields in (
        {},
        {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": 3000},
    ):
        yield _post("plain", CHAT + "/render", {"messages": [_USER], "request_id": "mine", **fields})
    for fields in (
        {"prompt": ["One", "Two fish"]},
        {"prompt": [5, 6], "stop": "x"},
        {"prompt": "A", "use_beam_search": True},
    ):
        yield _post("plain", COMPLETIONS + "/render", fields)
    yield _post("away", CHAT + "/render", {"messages": [_USER]})
    yield _post("away", COMPLETIONS + "/render", {"prompt": "A"})


def _named_logprobs() -> Iterator[Case]:
    """Yield requests that name the tokens whose logprobs they want."""
    named = {"logprob_token_ids": [28, 30], "return_tokens_as_token_ids": True, "max_tokens": 2}
    for fields in ({"logprobs": True, "top_logprobs": 5}, {}, {"logprobs": True, "use_beam_search": True}):
        yield from _both("plain", CHAT, {"messages": [_USER], **named, **fields})
    yield from _both("plain", COMPLETIONS, {"prompt": "Hello", **named, "logprobs": 5})
    for wrong in (
        {"logprob_token_ids": [1 << 20]},
        {"logprob_token_ids": [*range(21)]},
        {"echo": True, "max_tokens": 0},
    ):
        yield _post("plain", COMPLETIONS, {"prompt": "Hello", "logprobs": 1, **named, **wrong})


def _responses() -> Iterator[Case]:
    for fields in (
        {},
        {"max_output_tokens": 2, "instructions": "Be short.", "metadata": {"a": "b"}, "user": "me"},
        {"input": [_USER, {"role": "assistant", "content": "Yes?"}, {"type": "message", **_USER}], "temperature": 0},
        {"text": {"format": {"type": "json_schema", "name": "sum", "schema": _SCHEMA}}},
        {"text": {"format": {"type": "text"}}, "store": True, "top_p": 0.5, "request_id": "r"},
    ):
        yield from _both("plain", RESPONSES, {"input": "Hi", **fields})
    for name, value in (
        ("background", "perhaps"),
        ("previous_response_id", "resp_1"),
        ("truncation", "auto"),
        ("prompt", {"id": "p"}),
        ("top_logprobs", 1),
        ("max_output_tokens", 0),
        ("max_output_tokens", 1 << 20),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("input", []),
        ("input", [{"role": "nobody"}]),
        ("input", [{"type": "computer_call"}]),
        ("input", 3),
        ("text", {"format": {"type": "odd"}}),
        ("temperature", "hot"),
        ("reasoning", {"effort": 3}),
        ("tools", [{"type": "namespace", "name": "n"}]),
    ):
        yield _post("plain", RESPONSES, {"input": "Hi", name: value})
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 2}
    yield from _both("plain", RESPONSES, {"input": "Hi", "store": False, **include})
    for server, body in (("bare", {"input": "Hi"}), ("plain", {}), ("away", {"input": "Hi"})):
        yield _post(server, RESPONSES + "/input_tokens", body)
    yield Case("plain", "GET", RESPONSES + "/resp_1/input_items")
    for body in ({"background": True, "stream": True}, {"background": True, "store": False}):
        yield _post("plain", RESPONSES, {"input": "Hi", **body})
    tools = [
        {"type": "web_search"},
        {"type": "namespace", "name": "sums", "description": "Sums.", "tools": _FLAT_TOOLS},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
    ]
    calls = ({"name": "sums__add", "arguments": {"a": 1}}, {"name": "patch", "arguments": {"input": "+a"}})
    reply = "Hm.</think>" + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    yield from _both("tools", RESPONSES, {"input": "Hi", "tools": tools, "store": False}, replies=(reply,))


def _messages() -> Iterator[Case]:
    """Yield chats whose replies are read as messages: reasoning, content and calls, in two formats."""
    reasoned, called = "Hm.</think>Four.", "Hm.</think>I add. " + _CALL
    variants: tuple[dict[str, Any], ...] = (
        {"n": 2},
        {"logprobs": True, "return_token_ids": True},
        {"include_reasoning": False},
    )
    for fields, reply in (
        ({}, reasoned),
        ({}, called + _CALL),
        ({}, "no end"),
        *((fields, called) for fields in variants),
    ):
        yield from _both("tools", CHAT, {"messages": [_USER], "tools": _TOOLS, **fields}, replies=(reply, reasoned))
    for choice in ("auto", "required", _NAMED):
        yield from _both(
            "tools", CHAT, {"messages": _RESULTS, "tools": _TOOLS, "tool_choice": choice}, replies=(called,)
        )
    yield from _both("tools", RESPONSES, {"input": "Hi", "tools": _FLAT_TOOLS}, replies=(called,))
    yield from _both("tools", RESPONSES, {"input": "Hi", "reasoning": {"effort": "low"}}, replies=(reasoned,))
    for reply in _HARMONY:
        yield from _both("harmony", CHAT, {"messages": [_USER], "tools": _TOOLS}, replies=(reply,))
        yield from _both("harmony", RESPONSES, {"input": "Hi", "tools": _FLAT_TOOLS}, replies=(reply,))
    yield from _both("harmony", CHAT, {"messages": [_USER], "response_format": _JSON_SCHEMA}, replies=_HARMONY[:1])
    for body in ({"tool_choice": "required", "response_format": _JSON_SCHEMA}, {"response_format": _JSON_SCHEMA}):
        yield _post("tools", CHAT, {"messages": [_USER], "tools": _TOOLS, **body})
    yield _post("bare", CHAT, {"messages": [_USER], "tools": _TOOLS})


def _blocks() -> Iterator[Case]:
    """Yield requests in the form of Anthropic's API."""
    tools = [{"name": "add", "description": "Add.", "input_schema": _SCHEMA}]
    results = [
        _USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}]},
    ]
    body = {"messages": [_USER], "max_tokens": 60}
    called = "Hm.</think>I add. " + _CALL
    for fields in (
        {"system": "Be short.", "temperature": 0.5, "metadata": {"user_id": "u"}},
        {"max_tokens": 2},
        {"stop_sequences": ["there"], "request_id": "mine"},
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    ):
        yield from _both("plain", MESSAGES, body | fields)
    thinking = {"type": "adaptive", "display": "omitted"}
    for fields in ({}, {"tool_choice": {"type": "any"}}, {"messages": results}, {"thinking": thinking}):
        yield from _both("tools", MESSAGES, {**body, "tools": tools, **fields}, replies=(called,))
    for reply in _HARMONY:
        yield from _both("harmony", MESSAGES, {**body, "tools": tools}, replies=(reply,))
    for wrong in ({"max_tokens": 4000}, {"tools": [{}]}, {"odd": 1}, {"tool_choice": {"type": "any"}}):
        yield _post("plain", MESSAGES, body | wrong)
    for path, asked in ((MESSAGES, body), (MESSAGES + "/count_tokens", {"messages": [_USER]})):
        yield _post("bare", path, asked)
        yield _post("plain", path, {})
        yield _post("away", path, asked)
        yield _post("plain", path + "/nothing", asked)
        for headers in ({}, {"x-api-key": "secret"}):
            yield _post("guarded", path, asked, headers=headers)


def _ollama() -> Iterator[Case]:
    """Yield requests in the form of Ollama's API, whose answers are streams unless told."""
    reply = "Hm.</think>I add. " + _CALL
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    results = [_USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_name": "add"}]
    options = {"temperature": 0, "num_predict": 4, "stop": ["xyz"], "num_ctx": 4096, "repeat_penalty": 1.1}
    chats: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plain", {}),
        ("plain", {"model": "m:latest", "options": options, "keep_alive": "5m"}),
        ("plain", {"logprobs": True, "top_logprobs": 1, "options": {"num_predict": 2}}),
        ("plain", {"format": _SCHEMA}),
        ("plain", {"messages": []}),
        ("plain", {"messages": [_USER, {"role": "assistant", "content": "So"}]}),
        ("tools", {"tools": _TOOLS}),
        ("tools", {"tools": _TOOLS, "messages": results, "think": False}),
    )
    for server, fields in chats:
        body = {"messages": [_USER], **fields}
        for how in ({}, {"stream": False}):
            yield _post(server, OLLAMA, body | how, replies=(reply if server == "tools" else _ONE[0],))
    for fields in ({}, {"raw": True, "options": {"num_predict": 3}}, {"system": "Be short."}, {"prompt": ""}):
        for how in ({}, {"stream": False}):
            yield _post("plain", "/api/generate", {"prompt": "Hi", **fields} | how)
    for server in ("plain", "bare", "away"):
        yield _post(server, "/api/show", {"model": "m"})
        for path in ("/api/tags", "/api/ps", "/api/version"):
            yield Case(server, "GET", path)
    for path, body in ((OLLAMA, {"messages": [_USER]}), ("/api/generate", {"prompt": "Hi"})):
        yield _post("away", path, body)
        yield _post("full", path, body)


def _ollama_refusals() -> Iterator[Case]:
    for wrong in (
        {"model": "other"},
        {"options": {"mirostat": 2}},
        {"options": {"odd": 1}},
        {"options": {"temperature": -1}},
        {"options": {"num_predict": 1 << 20}},
        {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}},
        {"format": "xml"},
        {"messages": [{**_USER, "images": ["aGk="]}]},
        {"messages": 3},
    ):
        yield _post("plain", OLLAMA, {"messages": [_USER]} | wrong)
    for wrong in ({"context": [1]}, {"template": "x"}, {"suffix": "x"}, {"raw": True, "system": "x"}):
        yield _post("plain", "/api/generate", {"prompt": "Hi"} | wrong)
    yield _post("plain", "/api/show", {"model": "other"})
    yield _post("plain", "/api/show", "[]")
    yield _post("plain", "/api/pull", {"model": "m"})
    yield Case("plain", "GET", "/api/nothing")
    for headers in ({}, {"Authorization": "Bearer secret"}):
        yield _post("guarded", OLLAMA, {"messages": [_USER]}, headers=headers)
        yield Case("guarded", "GET", "/api/tags", headers=headers)


def _llama_cpp() -> Iterator[Case]:
    """Yield requests in the form of llama.cpp's API."""
    for fields in (
        {},
        {"n_predict": 3, "return_tokens": True, "timings_per_token": True},
        {"n_probs": 2, "n_predict": 2, "logit_bias": [[5, 1.5], [6, False]]},
        {"stop": ["there"], "cache_prompt": True, "temperature": 0.5, "repeat_penalty": 1.1, "seed": -1},
        {"grammar": 'root ::= "Yes" | "No"', "n_predict": -1, "response_fields": ["content", "timings/predicted_n"]},
        {"json_schema": _SCHEMA},
        {"prompt": [5, 6, 7], "n_predict": 1},
    ):
        yield from _both("plain", COMPLETION, {"prompt": "Hello", **fields})
    infill = {"input_prefix": "a = ", "input_suffix": "\n", "prompt": "1", "n_predict": 3}
    yield from _both("coder", "/infill", infill | {"input_extra": [{"filename": "b", "text": "b = 2"}]})
    yield _post("plain", "/infill", infill)
    yield _post("plain", "/infill", {})
    for body in ({"messages": [_USER]}, {"messages": [_USER], "tools": _TOOLS}, {"messages": []}, {}):
        yield _post("plain", "/apply-template", body)
    for wrong in (
        {"prompt": ["a", "b"]},
        {"n_predict": 0},
        {"mirostat": 1},
        {"grammar": "root ::="},
        {"logit_bias": [[5]]},
        {"logit_bias": [[5, "x"]]},
        {"temperature": "hot"},
    ):
        yield _post("plain", COMPLETION, {"prompt": "Hi"} | wrong)
    for path in ("/props", "/lora-adapters", "/slots"):
        yield Case("plain", "GET", path)
    yield Case("away", "GET", "/props")
    yield _post("plain", "/embedding", {"content": "Hi"})
    for path, body in ((COMPLETION, {"prompt": "Hi"}), ("/infill", infill), ("/apply-template", {"messages": [_USER]})):
        yield _post("away", path, body)
        yield _post("guarded", path, body)


def _aliases() -> Iterator[Case]:
    """Yield requests to paths without /v1, and to SageMaker's."""
    for path, body in (("/completions", {"prompt": "Hi"}), ("/chat/completions", {"messages": [_USER]})):
        yield _post("plain", path, body)
        yield _post("guarded", path, body)
        yield from _both("plain", "/invocations", body)
    yield _post("plain", "/responses", {"input": "Hi", "store": False})
    for body in ({}, {"input": "Hi"}, {"prompt": "Hi", "temperature": -1}):
        yield _post("plain", "/invocations", body)
    yield _post("guarded", "/invocations", {"prompt": "Hi"})
    yield _post("away", "/invocations", {"prompt": "Hi"})
    for path in ("/models", "/models/m", "/v1/health"):
        yield Case("plain", "GET", path)
    yield Case("guarded", "GET", "/models")
    yield Case("plain", "POST", "/ping")
    yield Case("away", "POST", "/ping")
    yield Case("plain", "GET", "/tokenizer_info")
    yield Case("guarded", "GET", "/server_info")
    yield Case("away", "GET", "/server_info")


def _pooling() -> Iterator[Case]:
    """Yield requests to models that embed and score, and to one that does neither."""
    ranked = {"query": "Hi", "documents": ["a", {"text": "a longer one"}]}
    for path, body in (
        ("/v1/embeddings", {"input": "Hi there", "model": "m"}),
        ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 3}),
        ("/v1/embeddings", {"input": "Hi", "dimensions": 99}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": "Hi", "model": "other"}),
        ("/embeddings", {"input": [5, 6, 7], "normalize": False}),
        (COMPLETIONS, {"prompt": "Hi"}),
        ("/v1/rerank", ranked),
    ):
        yield _post("embeds", path, body)
    for path, body in (
        ("/v1/rerank", ranked),
        ("/rerank", {**ranked, "top_n": 1, "return_documents": False}),
        ("/v2/rerank", {**ranked, "max_tokens_per_doc": 1, "use_activation": False}),
        ("/v1/rerank", {"query": "Hi", "documents": []}),
        ("/v1/rerank", {"query": "Hi", "documents": ["a"], "truncate_prompt_tokens": 3}),
        ("/v1/score", {"text_1": "Hi", "text_2": ["a", "a longer one"]}),
        ("/score", {"data_1": ["Hi"], "data_2": ["a"], "instruction": "Find letters."}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}),
        ("/v1/embeddings", {"input": "Hi"}),
        (CHAT, {"messages": [_USER]}),
    ):
        yield _post("scores", path, body)
    for server in ("plain", "away", "guarded"):
        yield _post(server, "/v1/embeddings", {"input": "Hi"})
        yield _post(server, "/v1/rerank", ranked)
        yield _post(server, "/v1/score", {"text_1": "a", "text_2": "b"})


def _adapters() -> Iterator[Case]:
    """Yield changes of adapters, which no server of these takes."""
    for server in ("plain", "guarded"):
        yield _post(server, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})
        yield _post(server, "/v1/unload_lora_adapter", {"lora_name": "a"})
    yield _post("plain", "/v1/load_lora_adapter", {"lora_name": "a"})
    yield _post("plain", "/v1/unload_lora_adapter", {})


def _tokens() -> Iterator[Case]:
    for body in (
        {"prompt": "Hello there"},
        {"prompt": "", "add_special_tokens": False},
        {"prompt": "Grüße 👩", "return_token_strs": True, "model": "m"},
        {"messages": [_USER]},
        {"messages": [_USER], "tools": _TOOLS, "add_generation_prompt": False, "return_token_strs": True},
        {"prompt": "x" * 200},
        {"messages": [{**_USER, "content": "x" * 200}]},
        {"messages": []},
        {"prompt": 3},
        {"prompt": "a", "model": "other"},
        {},
        "[]",
    ):
        yield _post("plain", "/tokenize", body)
    for body in ({"tokens": [5, 6, 2]}, {"tokens": []}, {"tokens": [-1]}, {"tokens": [5] * 60}, {"tokens": "a"}, {}):
        yield _post("plain", "/detokenize", body)


def _wrong_bodies() -> Iterator[Case]:
    own: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "Hi"},
        CHAT: {"messages": [_USER]},
        RESPONSES: {"input": "Hi"},
    }
    for path, body in own.items():
        for content in ("", "{", "[]", "3", "{}", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 900):
            yield _post("plain", path, content)
        for fields in (
            {"model": "other"},
            {"temperature": -1},
            {"top_p": 2, "stream": True},
            {"logit_bias": {"x": 1}},
            {"stop": ["a"] * 200},
            {"stream": "perhaps"},
            {"use_beam_search": True, "stream": True},
            {"priority": "high"},
            {"request_id": "a\nb"},
            {"seed": "a"},
            {"cache_salt": ""},
        ):
            yield _post("plain", path, body | fields)
    for path in (COMPLETIONS, CHAT):
        for fields in (
            {"n": 0},
            {"n": 65},
            {"max_tokens": 0},
            {"max_tokens": 1 << 20},
            {"best_of": 3},
            {"stream_options": {"include_usage": True}},
            {"prompt_logprobs": 1, "stream": True},
            {"logprobs": 99, "top_logprobs": 99},
            {"response_format": {"type": "json_schema"}},
            {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        ):
            yield _post("plain", path, own[path] | fields)


def _wrong_prompts() -> Iterator[Case]:
    for prompt in ([], [[]], [5000], [[1], "a"], 3):
        yield _post("plain", COMPLETIONS, {"prompt": prompt})
    for fields in (
        {"messages": []},
        {"messages": [3]},
        {"messages": [{"role": "user"}]},
        {"top_logprobs": 1},
        {"tools": [{"type": "function"}]},
        {"tools": _TOOLS, "tool_choice": "any"},
        {"tools": _TOOLS},
        {"chat_template": "x"},
        {"continue_final_message": True},
    ):
        yield _post("plain", CHAT, {"messages": [_USER], **fields})


def _other_paths() -> Iterator[Case]:
    for path in ("/v1/models", "/v1/models/m", "/v1/models/a/b", "/health", "/ping", "/version", "/load", "/metrics"):
        yield Case("plain", "GET", path)
        yield Case("plain", "HEAD", path)
    for path in (
        "/openapi.json",
        "/docs",
        "/redoc",
        "/page/icon.svg",
        "/nothing",
        COMPLETIONS,
        "/v1/responses/resp_1",
    ):
        yield Case("plain", "GET", path)
    for method, path in (
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("PUT", CHAT),
        ("DELETE", "/v1/models/m"),
        ("GET", RESPONSES),
        ("GET", "/tokenize"),
        ("PATCH", "/detokenize"),
        ("POST", "/metrics"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/v1/embeddings"),
        ("POST", "/generate"),
        ("GET", "/is_sleeping"),
        ("POST", "/v1/nothing"),
        ("POST", COMPLETIONS + "/"),
    ):
        yield Case("plain", method, path)
    yield Case("bare", "GET", "/")
    yield Case("bare", "GET", "/v1/models")
    for headers in ({"Content-Type": "text/plain"}, {"Origin": "https://b.example"}, {"X-Request-Id": "x" * 300}):
        yield _post("plain", COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}, headers=headers)
        yield _post("plain", "/tokenize", {"prompt": "Hi"}, headers=headers)


def _guarded() -> Iterator[Case]:
    """Yield requests to a server that asks for keys, names and origins, and has a limit of bodies."""
    key, origin = {"Authorization": "Bearer secret"}, {"Origin": "https://a.example"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, key, key | origin, key | {"X-Request-Id": "given"}):
        yield _post("guarded", COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}, headers=headers)
        yield Case("guarded", "GET", "/v1/models", headers=headers)
        yield Case("guarded", "GET", "/version", headers=headers)
    yield _post("guarded", CHAT, json.dumps({"messages": [_USER]}) + " " * 2000, headers=key)
    yield Case("guarded", "GET", "/version", headers={"Host": "evil.example"})
    yield Case("guarded", "OPTIONS", CHAT, headers=origin | {"Access-Control-Request-Method": "POST"})


def _admin() -> Iterator[Case]:
    """Yield changes of the server, with the key for them, with another, and where they are switched off."""
    master = {"Authorization": "Bearer master"}
    posts = ("/pause", "/pause?mode=keep&clear_cache=false", "/pause?mode=stop", "/is_paused", "/resume")
    for path in (*posts, "/pause_generation", "/continue_generation"):
        method = "GET" if path == "/is_paused" else "POST"
        for headers in (master, {"Authorization": "Bearer secret"}, {}):
            yield Case("admin", method, path, headers=headers)
        for server in ("plain", "away admin"):
            yield Case(server, method, path, headers=master)
    for path in ("/sleep", "/sleep?level=3", "/wake_up", "/wake_up?tags=weights&tags=nothing", "/is_sleeping"):
        for server in ("plain", "admin", "away admin"):
            yield Case(server, "GET" if path == "/is_sleeping" else "POST", path, headers=master)
    for body in ({"model_path": "/nowhere"}, {"model_path": ""}, {}):
        for server in ("plain", "admin", "away admin"):
            yield _post(server, "/update_weights_from_disk", body, headers=master)
    stream = {**master, "Content-Type": "application/octet-stream"}
    for server in ("plain", "admin", "away admin"):
        yield _post(server, "/update_weights_from_tensor", "stream", headers=stream)
        yield _post(server, "/update_weights_from_tensor", {"serialized_named_tensors": []}, headers=master)
        yield _post(server, "/update_weights", {"update_info": {"names": []}}, headers=master)
        yield _post(server, "/init_weights_update_group", {"backend": "nccl"}, headers=master)
        yield Case(server, "GET", "/get_world_size", headers=master)
        for path in (
            *("/begin_weight_update", "/end_weight_update", "/start_weight_update", "/finish_weight_update"),
            *("/destroy_weights_update_group", "/init_weight_transfer_engine", "/update_weights_from_distributed"),
        ):
            yield _post(server, path, {}, headers=master)
    for body in ({"mode": "retract"}, {"mode": "wait"}, "[]"):
        yield _post("admin", "/pause_generation", body, headers=master)
    yield _post("admin", "/v1/unload_lora_adapter", {"lora_name": "a"}, headers={"x-api-key": "secret"})
    yield Case("admin", "GET", "/v1/models", headers=master)


def _engineless() -> Iterator[Case]:
    for path, body in zip(_GENERATING, ({"prompt": "Hi"}, {"messages": [_USER]}, {"input": "Hi"}), strict=True):
        yield from _both("away", path, body)
        yield _post("away", path, "{}")
        yield _post("full", path, body)
    yield _post("away", "/tokenize", {"prompt": "Hi"})
    yield _post("away", "/detokenize", {"tokens": [1]})
    for path in ("/health", "/v1/models", "/version"):
        yield Case("away", "GET", path)
