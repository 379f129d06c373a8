# SPDX-License-Identifier: Apache-2.0
"""Bring a flattened conversation into the form in which a chat template shows all of it."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from blink.text.call_turns import split_calls
from blink.text.template_traits import INSTRUCTING, REASONING_NAMES, TemplateTraits

_BREAK = "\n\n"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARS = string.ascii_letters + string.digits


def fit_messages(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return flattened messages as a template with these traits takes them; what it shows anyway does not change."""
    fitted = _place_instructions(messages, traits)
    if traits.one_call:
        fitted = split_calls(fitted)
    return [_fit(message, traits) for message in fitted]


def _place_instructions(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> Sequence[Mapping[str, Any]]:
    """Give instructions a role that is known; where only the first are shown, or none, they move to the top."""
    places = [place for place, message in enumerate(messages) if message["role"] in INSTRUCTING]
    roles = traits.instruction_roles
    if roles and (traits.later_instructions or not any(places)):
        return [_name_role(message, roles) for message in messages]
    if not places:
        return messages
    text = _BREAK.join(filter(None, (messages[place]["content"] for place in places)))
    rest = [message for message in messages if message["role"] not in INSTRUCTING]
    if roles:
        return [{**_name_role(messages[places[0]], roles), "content": text}, *rest]
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": text}, *rest]
    content = _BREAK.join(filter(None, (text, rest[0]["content"])))
    return [{**rest[0], "content": content}, *rest[1:]]


def _name_role(message: Mapping[str, Any], roles: frozenset[str]) -> Mapping[str, Any]:
    if message["role"] not in INSTRUCTING or message["role"] in roles:
        return message
    return {**message, "role": next(role for role in INSTRUCTING if role in roles)}


def _fit(message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    fitted = dict(message)
    if reasoning := fitted.pop(REASONING_NAMES[0], None):
        fitted.update(dict.fromkeys(traits.reasoning_names, reasoning))
    if traits.short_ids:
        if "tool_calls" in fitted:
            fitted["tool_calls"] = [{**call, "id": _shorten_id(call.get("id"))} for call in fitted["tool_calls"]]
        if "tool_call_id" in fitted:
            fitted["tool_call_id"] = _shorten_id(fitted["tool_call_id"])
    return fitted


def _shorten_id(name: Any) -> Any:
    """Return nine letters and digits for an id, always the same ones: a call and its result still agree."""
    if not isinstance(name, str) or _SHORT_ID.fullmatch(name):
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=9).digest()
    return "".join(_ID_CHARS[byte % len(_ID_CHARS)] for byte in digest)
