# SPDX-License-Identifier: Apache-2.0
"""Read off a chat template how it writes an earlier call, where that is a mark, the name, another mark and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from blink.errors import BadRequestError
from blink.text.message.format_kinds import CallFormat
from blink.text.message.shapes import literally
from blink.text.template import ChatTemplate

_USER = {"role": "user", "content": "probeduser"}
_REPLY = "probedreply"
_NAMES = ("probed_first", "probed_second")
_ARGUMENTS = {"probedkey": "probedvalue"}
_JSON = re.compile(r'\{"probedkey": ?"probedvalue"\}')
_MARK = re.compile(r"(?=.*[^\w\s])[^\"{}]{2,}", re.DOTALL)  # plain words would be found in any text
_BETWEEN = re.compile(r"[^\"{}]*", re.DOTALL)


def read_call_shape(template: ChatTemplate) -> CallFormat | None:
    """Return the format of calls that a template shows, None if it is another than this one."""
    one, two = (_render(template, _calls(template, count)) for count in (1, 2))
    plain = _render(template, [{"role": "assistant", "content": _REPLY}])
    asked = _render(template, [], add_generation_prompt=True)
    found = _find_call(one, _NAMES[0], 0)
    starts = (plain.partition(_REPLY)[0], asked, _render(template, []))
    begin = max((len(start) for start in starts if start and one.startswith(start)), default=0)
    if not found or not begin or found[0] < begin:
        return None
    opening, rest = one[begin : found[0]].lstrip(), one[found[2] :]
    middle = one[found[0] + len(_NAMES[0]) : found[1]]
    second = _find_call(two, _NAMES[1], found[2])
    between = two[found[2] : second[0]] if second else ""
    if not _MARK.fullmatch(opening) or not _BETWEEN.fullmatch(middle) or not between.endswith(opening):
        return None
    end = _common_start(between.removesuffix(opening), rest)
    return CallFormat(
        opens=(opening.strip(),),
        closes=(end.strip(),) if end.strip() else (),
        heads=("%s~&{", f"%s~{literally(middle.strip())}~&{{"),
        trigger=opening,
        begin=f"{opening}\0{middle}".replace("%", "%%").replace("\0", "%s"),
        end=end,
        separator=between.removesuffix(opening)[len(end) :],
    )


def _calls(template: ChatTemplate, count: int) -> list[dict[str, Any]]:
    arguments = json.dumps(_ARGUMENTS) if template.traits.text_arguments else _ARGUMENTS
    calls = [
        {"id": f"probedid{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, name in enumerate(_NAMES[:count])
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


def _render(template: ChatTemplate, turns: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
    try:
        return template.render([_USER, *turns], add_generation_prompt=add_generation_prompt)
    except BadRequestError:
        return ""


def _find_call(text: str, name: str, start: int) -> tuple[int, int, int] | None:
    """Return where a call's name begins, and where its arguments begin and end."""
    place = text.find(name, start)
    found = _JSON.search(text, place) if place >= 0 else None
    return (place, found.start(), found.end()) if found else None


def _common_start(first: str, second: str) -> str:
    size = next((place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    return first[: min(len(first), len(second)) if size is None else size]
