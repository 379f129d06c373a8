# SPDX-License-Identifier: Apache-2.0
"""The tools of a response as functions of a chat: those of a namespace, and tools that take a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from blink.errors import BadRequestError

Item = dict[str, Any]

_SEPARATOR = "__"  # between the names of a namespace and of its function
_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The tool that a function of the chat stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # it takes a text, which the function has as its one argument

    @property
    def fields(self) -> Item:
        """Return how a call names it."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}

    def text_of(self, arguments: str) -> str:
        """Return the text that a call brings; of one that was cut, what there is."""
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else arguments


def read_tools(tools: Sequence[Item]) -> tuple[list[Item], dict[str, Origin]]:
    """Return the functions of the chat, and what those of them stand for that are no functions by themselves.

    Tools of other types are some other server's: they are passed over, as in vLLM.

    Raises:
        BadRequestError: a tool is malformed.
    """
    functions: list[Item] = []
    origins: dict[str, Origin] = {}
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "namespace":
            for inner in _members_of(tool, f"tools.{index}"):
                _add(functions, origins, inner, str(tool["name"]))
        elif not isinstance(kind, str):
            raise BadRequestError(f"tools.{index}.type must be a string.", "tools")
        else:
            _add(functions, origins, tool, None)
    return functions, origins


def _members_of(tool: Item, place: str) -> list[Item]:
    members = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(members, list):
        raise BadRequestError(f"{place}: a namespace must have a name and a list of tools.", "tools")
    if not all(isinstance(member, dict) for member in members):
        raise BadRequestError(f"{place}.tools must hold objects.", "tools")
    return members


def _add(functions: list[Item], origins: dict[str, Origin], tool: Item, namespace: str | None) -> None:
    is_custom = tool.get("type") == "custom"
    if not is_custom and tool.get("type") != "function":
        return
    function = _text_function(tool) if is_custom else {name: value for name, value in tool.items() if name != "type"}
    name = function.get("name")
    if isinstance(name, str) and (is_custom or namespace is not None):
        function["name"] = flat_name(name, namespace)
        origins[function["name"]] = Origin(name, namespace, is_custom)
    functions.append({"type": "function", "function": function})


def _text_function(tool: Item) -> Item:
    """Return the function of a tool that takes a text; a grammar of the text is told, not kept to."""
    described = [tool.get("description"), "The input is plain text."]
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        described.append(f"It follows this {form.get('syntax')} grammar:\n{form.get('definition')}")
    description = "\n".join(text for text in described if isinstance(text, str))
    return {"name": tool.get("name"), "description": description, "parameters": _TEXT}


def flat_name(name: str, namespace: Any) -> str:
    """Return the name of a tool's function in the chat."""
    return f"{namespace}{_SEPARATOR}{name}" if isinstance(namespace, str) and namespace else name


def chat_choice(choice: Any) -> Any:
    """Return a choice in the form of the chat API."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [chat_choice(tool) for tool in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    kind = "function" if choice.get("type") == "custom" else choice.get("type")
    name = choice.get("name")
    return {"type": kind, "function": {"name": _flat_name_of(choice) if isinstance(name, str) else name}}


def chat_call(item: Mapping[str, Any]) -> Item:
    """Return an earlier call in the form of the chat API.

    Raises:
        BadRequestError: it brings no text.
    """
    is_custom = item.get("type") == "custom_tool_call"
    if is_custom and not isinstance(item.get("input"), str):
        raise BadRequestError("The input of a custom_tool_call must be a string.", "input")
    arguments = orjson.dumps({"input": item.get("input")}).decode() if is_custom else item.get("arguments")
    function = {"name": _flat_name_of(item), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _flat_name_of(item: Mapping[str, Any]) -> Any:
    name = item.get("name")
    return flat_name(name, item.get("namespace")) if isinstance(name, str) else name
