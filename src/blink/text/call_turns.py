# SPDX-License-Identifier: Apache-2.0
"""Arrange earlier calls for templates that take one call in a message: each stands before its own result."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any


def split_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of one call each; what stands beside several calls stays with the first of them."""
    results, placed = _Results(messages), set[int]()
    arranged: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if place in placed:
            continue
        for part in _split_message(message):
            arranged.append(part)
            for call in part.get("tool_calls", ()):
                if (found := results.take(call, place)) is not None:
                    arranged.append(dict(messages[found]))
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


def _split_message(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls") if message["role"] == "assistant" else None
    if not calls:
        yield dict(message)
    for call in calls or ():
        yield {**message, "tool_calls": [call]}
        message = {"role": "assistant", "content": ""}
