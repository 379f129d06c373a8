# SPDX-License-Identifier: Apache-2.0
"""Match short structures, such as a tag with a name in it, at the beginning of growing text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

_ELEMENTS = {
    "%s": r"(?P<name>[\w.-]{1,256})",  # of a function
    "%k": r"""(?P<key>[^<>"\n]{1,256})""",  # the name of an argument
    "%v": r"(?P<key>[^\W\d]\w{0,255})",  # the same, as a variable
    "%w": r"(?P<word>[a-z\[\]]{1,64})",
    "%i": r"[\w-]{0,64}",
    "%d": r"\d{1,9}",
    "~": r"\s{0,64}",
    **{f"%{sign}": re.escape(sign) for sign in "%~&"},
}
_TEMPLATE = re.compile(r"%[skvwid%~&]|.", re.DOTALL)


def literally(text: str) -> str:
    """Return the template of a text."""
    return re.sub("[%~&]", r"%\g<0>", text)


class Shapes:
    """Some structures, of which the one that is complete first is found.

    Each is a template: `%s` stands for a function's name, `%k` and `%v` for an argument's, `%w`, `%i` and `%d` for a
    word, an id and a number, `~` for space or none. What stands behind `&` must follow, and is not part of it. No
    element may begin as the text behind it does, so a structure is complete in one place.
    """

    def __init__(self, templates: Sequence[str]) -> None:
        self._templates = templates

    # Compiled when they are needed: a process has the formats of all models, and reads that of one.
    @cached_property
    def _whole(self) -> list[re.Pattern[str]]:
        return [re.compile(_whole(_TEMPLATE.findall(template))) for template in self._templates]

    @cached_property
    def _begun(self) -> list[re.Pattern[str]]:
        return [re.compile(_begun(_TEMPLATE.findall(template))) for template in self._templates]

    def match(self, text: str, place: int = 0) -> re.Match[str] | None:
        """Return the structure that stands at a place, None if there is none."""
        found = [match for pattern in self._whole if (match := pattern.match(text, place))]
        return min(found, key=lambda match: match.end("done"), default=None)

    def may_begin(self, text: str, place: int = 0) -> bool:
        """Say whether all of the text from a place on is the beginning of a structure."""
        return any(pattern.fullmatch(text, place) for pattern in self._begun)


def _whole(parts: Sequence[str]) -> str:
    pattern = "".join("(?=" if part == "&" else _ELEMENTS.get(part) or re.escape(part) for part in parts)
    return f"{pattern}(?P<done>){')' if '&' in parts else ''}"


def _begun(parts: Sequence[str]) -> str:
    pattern = ""
    for part in reversed([part for part in parts if part != "&"]):
        pattern = f"(?:{_ELEMENTS.get(part) or re.escape(part)}{pattern})?"
    return pattern
