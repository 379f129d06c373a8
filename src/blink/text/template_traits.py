# SPDX-License-Identifier: Apache-2.0
"""What a chat template shows and what it refuses: found out once, by rendering small conversations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blink.errors import BadRequestError
from blink.text.call_turns import split_calls

ToolsPlace = Literal["variable", "message", "none"]
Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]

INSTRUCTING = ("system", "developer")  # roles
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

_SECONDS = 1.0  # of computing: no honest template takes a tenth of it
_UNKNOWN_ROLE, _UNKNOWN_FIELD = "unheardof", "unheardof_field"
_ID, _LONG_ID = "probedid1", "call_probed-id-1"
_VALUES = ("probedvalue1", "probedvalue2")
_RESULTS = ("probedresult1", "probedresult2")
_NAME = "probed_tool"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"probedkey": {"type": "string", "description": "Probed."}},
            "required": ["probedkey"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """How a conversation must look for a template to show all of it."""

    tools_place: ToolsPlace  # where it looks for tools
    instruction_roles: frozenset[str] = frozenset({"system"})  # those of INSTRUCTING that it has turns for
    later_instructions: bool = True  # it shows them behind the first message, too
    text_arguments: bool = False  # a call's arguments are JSON text, not an object
    one_call: bool = False  # in a message
    short_ids: bool = False  # of calls: nine letters or digits
    reasoning_names: tuple[str, ...] = REASONING_NAMES  # fields that earlier reasoning is read from


def probe_traits(render: Render, guess: ToolsPlace) -> TemplateTraits:
    """Find out a template's traits; `guess` says where it looks for tools if it does not show even a plain message."""
    probe = _Probe(render)
    user = _message("user", "probeduser")
    if not probe.shows([user], user["content"]):
        probe.variables = {"tools": [_TOOL]}
        if not probe.shows([user], user["content"]):
            return TemplateTraits(tools_place=guess)
    roles, tools_place = _find_instruction_roles(probe), _find_tools_place(probe)
    later = _shows_later(probe, roles)
    if tools_place == "variable":
        probe.variables = {"tools": [_TOOL]}
    # Where there is no place for tools, calls are told in words.
    text_arguments = tools_place != "none" and _takes_text(probe)
    return TemplateTraits(
        tools_place=tools_place,
        instruction_roles=roles,
        later_instructions=later,
        text_arguments=text_arguments,
        one_call=tools_place != "none" and _takes_one_call(probe, text_arguments),
        short_ids=tools_place != "none" and _wants_short_ids(probe, text_arguments),
        reasoning_names=_find_reasoning_names(probe, text_arguments),
    )


class _Probe:
    """The template with the variables that it is rendered with."""

    def __init__(self, render: Render) -> None:
        self.variables: Mapping[str, Any] = {}
        self._render = render
        self._deadline = time.thread_time() + _SECONDS

    def shows(self, messages: Sequence[Mapping[str, Any]], *markers: str, **variables: Any) -> str:
        """Return what is rendered if all markers are in it, else nothing."""
        if time.thread_time() > self._deadline:
            return ""
        try:
            text = self._render(messages, {**self.variables, **variables})
        except (BadRequestError, RecursionError):
            return ""
        return text if all(marker in text for marker in markers) else ""


def _message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _begin(role: str) -> list[dict[str, Any]]:
    return [_message(role, "probedrule"), _message("user", "probeduser")]


def _find_instruction_roles(probe: _Probe) -> frozenset[str]:
    shown = {role: probe.shows(_begin(role), "probedrule", "probeduser") for role in (*INSTRUCTING, _UNKNOWN_ROLE)}
    # A template that writes any role's name down has not been told of this one.
    unknown = shown.pop(_UNKNOWN_ROLE).lower().replace(_UNKNOWN_ROLE, "developer")
    if shown["developer"].lower() == unknown:
        del shown["developer"]
    return frozenset(role for role, text in shown.items() if text)


def _shows_later(probe: _Probe, roles: frozenset[str]) -> bool:
    for role in roles:
        first, user = _begin(role)
        later = _message(role, "probedlater")
        talk = [first, user, _message("assistant", "probedreply"), later, _message("user", "probednext")]
        markers = ("probedrule", "probeduser", "probedlater")
        if not probe.shows([first, later, user], *markers) or not probe.shows(talk, *markers, "probednext"):
            return False
    return True


def _find_tools_place(probe: _Probe) -> ToolsPlace:
    system, user = _begin("system")
    if probe.shows([user], _NAME, tools=[_TOOL]) or probe.shows([system, user], _NAME, tools=[_TOOL]):
        return "variable"
    is_shown, is_dumped = (probe.shows([{**system, field: _NAME}, user], _NAME) for field in ("tools", _UNKNOWN_FIELD))
    return "message" if is_shown and not is_dumped else "none"


def _arguments(place: int, as_text: bool) -> Any:
    arguments = {"probedkey": _VALUES[place]}
    return json.dumps(arguments) if as_text else arguments


def _call(place: int, arguments: Any, call_id: str = _ID) -> dict[str, Any]:
    # Ids differ in their last character.
    function = {"name": _NAME, "arguments": arguments}
    return {"id": call_id[:-1] + str(place + 1), "type": "function", "function": function}


def _talk(calls: Sequence[Mapping[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Return a conversation with calls and their results."""
    results = [_message("tool", result, tool_call_id=call["id"]) for call, result in zip(calls, _RESULTS, strict=False)]
    made = _message("assistant", "", tool_calls=list(calls), **fields)
    return [_message("user", "probeduser"), made, *results]


def _takes_text(probe: _Probe) -> bool:
    shown: list[str] = []
    for as_text in (False, True):
        talk = _talk([_call(0, _arguments(0, as_text))])
        shown.append(probe.shows(talk, _VALUES[0]) or probe.shows(talk[:2], _VALUES[0]))
    as_object, as_text = shown
    is_python = "{'probedkey'" in as_object
    is_quoted_twice = '\\"probedkey' in as_text
    return bool(as_text) and not is_quoted_twice and (not as_object or is_python)


def _takes_one_call(probe: _Probe, text_arguments: bool) -> bool:
    talk = _talk([_call(place, _arguments(place, text_arguments)) for place in range(2)])
    markers = (*_VALUES, *_RESULTS)
    return not probe.shows(talk, *markers) and bool(probe.shows(split_calls(talk), *markers))


def _wants_short_ids(probe: _Probe, text_arguments: bool) -> bool:
    short, long = (_talk([_call(0, _arguments(0, text_arguments), name)]) for name in (_ID, _LONG_ID))
    return bool(probe.shows(short, _VALUES[0])) and not probe.shows(long, _VALUES[0])


def _find_reasoning_names(probe: _Probe, text_arguments: bool) -> tuple[str, ...]:
    """Return the fields that reasoning is shown from, in the last message, an earlier one, or before a call."""
    marker, call = "probedreason", _call(0, _arguments(0, text_arguments))

    def count(names: Sequence[str]) -> int:
        fields = dict.fromkeys(names, marker)
        answered = [_message("user", "probeduser"), _message("assistant", "probedreply", **fields)]
        talks = [answered, [*answered, _message("user", "probednext")], _talk([call], **fields)]
        return max(probe.shows(talk, marker).count(marker) for talk in talks)

    counts = {name: found for name in REASONING_NAMES if (found := count([name]))}
    if not counts:
        return REASONING_NAMES  # it may show reasoning in other conversations
    names = tuple(counts)
    return names if count(names) <= max(counts.values()) else names[:1]
