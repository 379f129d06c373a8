# SPDX-License-Identifier: Apache-2.0
"""A sound body of many parts for each endpoint that takes one, and the same with another value in some place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

Place = tuple[str | int, ...]  # names and indices from the body down

_HOLE = "a value goes here"
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "x"}'}}
_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "name": "f", "content": "ok"},
    {"role": "assistant", "content": "fine", "refusal": None, "reasoning_content": "r"},
    {"role": "user", "name": "n", "content": "go"},
]
_ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "ok"},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
    {
        **{"type": "message", "role": "assistant", "id": "m", "status": "completed"},
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    },
]
_FLAT_TOOLS = [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}]
_BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "is_error": False, "content": [{"type": "text", "text": "ok"}]},
            {"type": "text", "text": "go"},
        ],
    },
]
_BLOCK_TOOLS = [{"name": "f", "description": "d", "input_schema": _SCHEMA}]
_OLLAMA: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi", "images": []},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "x"}}}]},
    {"role": "tool", "tool_name": "f", "content": "ok"},
]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **{"prompt": ["Hi", "Ho"], "max_tokens": 1, "stop": ["a"], "logit_bias": {"3": 1}, "logprobs": 2, "echo": True},
        **{"structured_outputs": {"json": _SCHEMA}, "bad_words": ["x"], "stop_token_ids": [3], "n": 1, "seed": 3},
    },
    "/v1/chat/completions": {
        **{"messages": _CHAT, "max_tokens": 1, "tools": _TOOLS, "logprobs": True, "top_logprobs": 2},
        **{"tool_choice": {"type": "function", "function": {"name": "f"}}, "metadata": {"a": "b"}},
        **{"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
    },
    "/v1/chat/completions/batch": {
        **{"messages": [_CHAT[-1:], _CHAT[-1:]], "max_tokens": 1, "logprobs": True, "top_logprobs": 1, "seed": 3},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    },
    "/v1/chat/completions/render": {"messages": _CHAT, "max_tokens": 1, "tools": _TOOLS, "temperature": 0.5},
    "/v1/completions/render": {
        "prompt": ["Hi", "Ho"],
        "max_tokens": 1,
        "stop": ["a"],
        "logit_bias": {"3": 1},
        "bad_words": ["x"],
    },
    "/v1/embeddings": {
        **{"input": ["Hi", "Ho"], "encoding_format": "base64", "dimensions": 2, "truncate_prompt_tokens": 3},
        **{"user": "u", "priority": 0, "add_special_tokens": True},
    },
    "/v1/rerank": {
        **{"query": "Hi", "documents": ["Ho", {"text": "Hu"}], "top_n": 1, "return_documents": True},
        "truncate_prompt_tokens": -1,
    },
    "/v1/score": {"text_1": ["Hi"], "text_2": ["Ho", "Hu"], "truncate_prompt_tokens": -1},
    "/invocations": {
        **{"messages": _CHAT[-1:], "max_tokens": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": _SCHEMA}},
    },
    "/v1/responses": {
        **{"input": _ITEMS, "instructions": "i", "max_output_tokens": 1, "tools": _FLAT_TOOLS, "store": False},
        **{"tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "text"}}},
        **{"reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"]},
    },
    "/v1/responses/input_tokens": {"input": _ITEMS, "tools": _FLAT_TOOLS},
    "/v1/messages": {
        **{"model": "m", "max_tokens": 1, "messages": _BLOCKS, "tools": _BLOCK_TOOLS, "stop_sequences": ["a"]},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        **{"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "output_config": {"effort": "low"}},
    },
    "/v1/messages/count_tokens": {
        **{"model": "m", "system": "s", "messages": _BLOCKS, "tools": _BLOCK_TOOLS, "tool_choice": {"type": "any"}},
    },
    "/api/chat": {
        **{"model": "m", "messages": _OLLAMA, "tools": _TOOLS, "format": _SCHEMA, "think": False, "stream": False},
        **{"options": {"num_predict": 1, "stop": ["a"], "temperature": 0.5, "seed": 1}, "keep_alive": "5m"},
    },
    "/api/generate": {
        **{"model": "m", "prompt": "Hi", "system": "s", "raw": False, "format": "json", "stream": False},
        **{"options": {"num_predict": 1}, "images": []},
    },
    "/api/show": {"model": "m", "verbose": True},
    "/completion": {
        **{"prompt": "Hi", "n_predict": 1, "stop": ["a"], "logit_bias": [[3, 1.0]], "json_schema": _SCHEMA},
        **{"n_probs": 2, "response_fields": ["content"]},
    },
    "/infill": {
        **{"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 1},
        "input_extra": [{"filename": "f", "text": "t"}],
    },
    "/apply-template": {"messages": _CHAT, "tools": _TOOLS, "chat_template_kwargs": {"a": 1}},
    "/tokenize": {"messages": _CHAT, "tools": _TOOLS, "chat_template_kwargs": {"a": [1]}},
    "/detokenize": {"tokens": [28, 3]},
}


def places_in(value: Any, before: Place = ()) -> Iterator[Place]:
    """Return the place of each value inside of another one."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield (*before, name)
        yield from places_in(part, (*before, name))


def with_value(body: dict[str, Any], place: Place, value: str) -> bytes:
    """Return a body as JSON, with a value, written as it is, in some place."""
    changed = deepcopy(body)
    part: Any = changed
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = _HOLE
    return json.dumps(changed).replace(json.dumps(_HOLE), value).encode()
