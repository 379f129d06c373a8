# SPDX-License-Identifier: Apache-2.0
"""Bring a conversation into the form that gpt-oss' chat template shows whole.

The template, as published, shows the first message's instructions only and one call of a message, names results after
the last call, and refuses content beside reasoning in a message with a call, and tools without a description.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from blink.errors import BadRequestError

_INSTRUCTING = ("system", "developer")
_ROLES = (*_INSTRUCTING, "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high")
_BREAK = "\n\n"


def arrange_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return flattened messages with all instructions in the first, reasoning as `thinking`, and one call each.

    Raises:
        BadRequestError: a message has a role that the template would leave out.
    """
    if unknown := next((message["role"] for message in messages if message["role"] not in _ROLES), ""):
        raise BadRequestError(f"This model knows no role {unknown!r}; its roles are {', '.join(_ROLES)}.", "messages")
    instructions = [message["content"] for message in messages if message["role"] in _INSTRUCTING]
    rest = [message for message in messages if message["role"] not in _INSTRUCTING]
    arranged: list[dict[str, Any]] = []
    if instructions:
        arranged.append({"role": "developer", "content": _BREAK.join(filter(None, instructions))})
    results, placed = _Results(rest), set[int]()
    for place, message in enumerate(rest):
        if place in placed:
            continue
        for part in _split_calls(message):
            arranged.append(part)
            for call in part.get("tool_calls", ()):
                if (found := results.take(call, place)) is not None:
                    arranged.append(dict(rest[found]))
                    placed.add(found)
    return arranged


class _Results:
    """The places of calls' results, each up to the user's next message."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._turns = list(accumulate(message["role"] == "user" for message in messages))
        self._places: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                self._places[self._turns[place], str(message.get("tool_call_id"))].append(place)

    def take(self, call: Mapping[str, Any], behind: int) -> int | None:
        """Return the place of a call's result behind a place, once."""
        places = self._places[self._turns[behind], str(call.get("id"))]
        while places:
            if (place := places.popleft()) > behind:
                return place
        return None


def _split_calls(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a message, or one for each of its calls; the first has what stands beside them."""
    if message["role"] != "assistant":
        yield dict(message)
        return
    message = _name_reasoning(message)
    calls = message.get("tool_calls")
    if not calls:
        yield dict(message)
    for call in calls or ():
        yield {**message, "tool_calls": [call]}
        message = {"role": "assistant", "content": ""}


def _name_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    thinking = message.get("reasoning_content") or message.get("thinking")
    if not thinking:
        return message
    if message.get("tool_calls") and message["content"]:
        # In a message with a call the template takes the content for reasoning.
        rest = {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
        return {**rest, "content": f"{thinking}{_BREAK}{message['content']}"}
    return {**message, "thinking": thinking}


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools each of which has a description, if an empty one."""
    return [{**tool, "function": _describe(tool.get("function") or {})} for tool in tools]


def _describe(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "description": function.get("description") or ""}


def spell(value: Any, spell_text: Callable[[str], str]) -> Any:
    """Return a value of JSON with each text in it spelled: what a client sends never makes a message of its own.

    Raises:
        BadRequestError: it is nested too deeply.
    """
    try:
        return _spell(value, spell_text)
    except RecursionError:
        raise BadRequestError("The messages are nested too deeply.", "messages") from None


def _spell(value: Any, spell_text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return spell_text(value)
    if isinstance(value, Mapping):
        return {_spell(name, spell_text): _spell(each, spell_text) for name, each in value.items()}
    return [_spell(each, spell_text) for each in value] if isinstance(value, list | tuple) else value


def check_effort(effort: object) -> None:
    """Refuse an effort that the models do not know.

    Raises:
        BadRequestError: it is none of theirs.
    """
    if effort not in _EFFORTS:
        raise BadRequestError(
            f"This model's reasoning_effort must be one of {', '.join(_EFFORTS)}.", "reasoning_effort"
        )
