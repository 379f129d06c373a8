# SPDX-License-Identifier: Apache-2.0
"""Tools for chat templates that do not take them: told in words, in the form of Hermes' models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blink.text.template_traits import INSTRUCTING

_INSTRUCTIONS = """You can call functions. Their signatures, as JSON, are between the tags <tools> and </tools>:
<tools>
%s
</tools>
To call a function, write a JSON object with its name and arguments between the tags <tool_call> and </tool_call>:
<tool_call>
{"name": "the function's name", "arguments": {"argument": "value"}}
</tool_call>"""


def tell_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return flattened messages with the tools, earlier calls and their results as text."""
    told: list[dict[str, Any]] = []
    if tools:
        told.append({"role": "system", "content": _INSTRUCTIONS % "\n".join(_dump(tool) for tool in tools)})
    for place, message in enumerate(messages):
        last = told[-1] if told else None
        if place == 0 and last and message["role"] in INSTRUCTING:
            told = [{**message, "content": f"{message['content']}\n\n{last['content']}"}]
        elif message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            # Results of parallel calls are one turn: some templates insist that turns alternate.
            if messages[place - 1]["role"] == "tool" and last and place:
                last["content"] += "\n" + result
            else:
                told.append({"role": "user", "content": result})
        else:
            calls = [_tell_call(call["function"]) for call in message.get("tool_calls", ())]
            content = "\n".join(filter(None, [message["content"], *calls]))
            told.append({**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content})
    return told


def put_tools_in_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the messages with the tools as a field of the system's, where Phi-4's template looks for them."""
    first: Mapping[str, Any] = {"role": "system", "content": ""}
    rest = messages
    if messages and messages[0]["role"] in INSTRUCTING:
        first, rest = messages[0], messages[1:]
    return [{**first, "role": "system", "tools": json.dumps(tools, ensure_ascii=False)}, *rest]


def _tell_call(function: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{_dump({'name': function['name'], 'arguments': function['arguments']})}\n</tool_call>"


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
