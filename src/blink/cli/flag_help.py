# SPDX-License-Identifier: Apache-2.0
"""A part of a command's help, as vLLM has it: --help=all, --help=listgroup, --help=GROUP, --help=FLAG."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

_PREFIX = "--help="
_ALL = ("all", "page")
_GROUPS = "listgroup"
_OWN_GROUPS = ("positional arguments", "options")


def find_topic(words: Sequence[str]) -> str | None:
    """Return what help is asked for; None if none is, or all of it by a bare --help."""
    return next((word[len(_PREFIX) :] for word in words if word.startswith(_PREFIX)), None)


def describe_topic(parser: argparse.ArgumentParser, topic: str) -> str | None:
    """Return the help on a topic; None if there is no such group or flag."""
    if topic in _ALL:
        return parser.format_help()
    groups = [group for group in parser._action_groups if group.title not in _OWN_GROUPS]
    if topic == _GROUPS:
        return "groups of flags:\n" + "".join(f"  {group.title:<10} {group.description}\n" for group in groups)
    name = topic.lower().lstrip("-").replace("_", "-")
    for group in groups:
        if group.title == name.removesuffix("config"):
            return _write(parser, group.title, group.description, group._group_actions)
    found = [action for action in parser._actions if any(name in option for option in action.option_strings)]
    exact = [action for action in found if f"--{name}" in action.option_strings]
    return _write(parser, "flags", None, exact or found) if found and name else None


def _write(
    parser: argparse.ArgumentParser, title: str | None, text: str | None, actions: Iterable[argparse.Action]
) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title)
    formatter.add_text(text)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
