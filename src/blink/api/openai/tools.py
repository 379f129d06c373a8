# SPDX-License-Identifier: Apache-2.0
"""Check the tools of a request: what may be called, and what must."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from blink.errors import BadRequestError
from blink.structured_outputs import MAX_TAGS
from blink.text.message.tool_use import Function, ToolUse

MAX_TOOLS = MAX_TAGS  # each is a form that the output may have
MAX_SCHEMAS_BYTES = 256 << 10
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_tool_fields(fields: Mapping[str, Any]) -> None:
    """Refuse what would be much work to check one by one.

    Raises:
        BadRequestError: there are too many tools.
    """
    tools = fields.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise BadRequestError(f"tools must be at most {MAX_TOOLS} entries, got {len(tools)}.", "tools")


def read_tool_use(tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolUse | None:
    """Return what the reply may or must call, None for nothing.

    Raises:
        BadRequestError: a tool or the choice is malformed; `param` names the field.
    """
    functions = _read_functions(tools or ())
    if choice is None:
        choice = "auto" if functions else "none"
    if choice == "none":
        return None
    if not functions:
        raise BadRequestError("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict) and isinstance(allowed := choice.get("allowed_tools"), dict):
        functions, choice = _select(functions, allowed), allowed.get("mode")
    if choice in ("auto", "required"):
        return ToolUse(functions, choice, parallel)
    return ToolUse(_select(functions, {"tools": [choice]}), "named", False)


def _select(functions: Sequence[Function], allowed: Mapping[str, Any]) -> tuple[Function, ...]:
    """Return the functions that a choice names."""
    tools = allowed.get("tools")
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    selected = tuple(function for function in functions if function.name in names)
    if not selected or len(selected) < len(set(names)):
        raise BadRequestError("tool_choice names a function that is not among the tools.", "tool_choice")
    return selected


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or'
            ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.',
            "tool_choice",
        )
    return name


def _read_functions(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    functions = tuple(_read_function(tool, f"tools.{index}") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            raise BadRequestError(f"tools.{index}: another function has this name too.", "tools")
        seen.add(function.name)
    if sum(len(json.dumps(function.parameters)) for function in functions) > MAX_SCHEMAS_BYTES:
        raise BadRequestError(f"The tools' parameters must be at most {MAX_SCHEMAS_BYTES} bytes of JSON.", "tools")
    return functions


def _read_function(tool: Mapping[str, Any], place: str) -> Function:
    if tool.get("type", "function") != "function":
        raise BadRequestError(f'{place}.type must be "function": this server has no tools of its own.', "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequestError(f"{place}.function must be an object.", "tools")
    name, parameters, strict = (function.get(field) for field in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequestError(
            f"{place}.function.name must be 1 to 128 letters, digits, underscores, dots and dashes.", "tools"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise BadRequestError(f"{place}.function.description must be a string.", "tools")
    if not isinstance(parameters, dict | None):
        raise BadRequestError(f"{place}.function.parameters must be a JSON schema, which is an object.", "tools")
    if not isinstance(strict, bool | None):
        raise BadRequestError(f"{place}.function.strict must be true or false.", "tools")
    return Function(name, parameters, bool(strict))
