# SPDX-License-Identifier: Apache-2.0
"""Replies in gpt-oss' format, as expressions: reasoning, then a call or an answer that may have a form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blink.grammar.expression import MAX_CODE_POINT, Expression, Repeat, chars, choice, optional, series
from blink.grammar.literal import SPECIAL_MARK
from blink.structured_outputs import Channels

_TEXT = Repeat(chars((0, MAX_CODE_POINT)), 0, None)  # holds no special token


def _special(name: str) -> bytes:
    return SPECIAL_MARK + f"<|{name}|>".encode()


_CHANNEL, _MESSAGE = _special("channel"), _special("message")
_NEXT = series(_special("end"), _special("start"), "assistant")
_JSON = optional(choice([" json", series(optional(series(" ")), _special("constrain"), "json")]))


def compile_channels(
    channels: Channels, form: Expression | None, compile_schema: Callable[[Any], Expression]
) -> Expression:
    """Return the replies that channels allow; `form` is that of an answer's text, None: any.

    Raises:
        GrammarError: the arguments of a call cannot be compiled.
    """
    before, ends = [_free_message("analysis")], list[Expression]()
    if channels.calls:
        ends.append(_calls(channels, compile_schema))
    if channels.may_answer:
        ends.append(series(_CHANNEL, "final", _JSON, _MESSAGE, _TEXT if form is None else form))
        if form is None:  # an answer in a form is all that is shown
            before.append(_free_message("commentary"))
    reply = series(Repeat(choice(before), 0, None), choice(ends))
    if channels.begins_in == "analysis":
        return series(_TEXT, _NEXT, reply)
    if channels.begins_in == "final":
        return (_TEXT if form is None else form) if channels.may_answer else series(_TEXT, _NEXT, reply)
    return reply


def _free_message(channel: str) -> Expression:
    return series(_CHANNEL, channel, _MESSAGE, _TEXT, _NEXT)


def _calls(channels: Channels, compile_schema: Callable[[Any], Expression]) -> Expression:
    """Return one call; its recipient stands behind the role or the channel, as models write either."""
    forms: list[Expression] = []
    channel = series(_CHANNEL, choice(["commentary", "analysis"]))
    for recipient, schema in channels.calls.items():
        to = f" to={recipient}"
        header = choice([series(to, channel), series(channel, to)])
        forms.append(series(header, _JSON, _MESSAGE, compile_schema(schema)))
    return choice(forms)
