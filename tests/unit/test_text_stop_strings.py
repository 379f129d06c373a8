# SPDX-License-Identifier: Apache-2.0
"""Stop strings in growing text, against a search that looks at one character after the other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from blink.text.stop_strings import StopMatcher

PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text as cut by the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.finish(), None


@settings(max_examples=1000, deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_any_split_gives_the_same_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == search("".join(pieces), stops, include)


@settings(max_examples=500, deadline=None)
@given(PIECES, STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    seen = given_text = ""
    for piece in pieces:
        seen += matcher.push(piece)
        given_text += piece
        if matcher.matched is not None:
            return
        held = given_text[len(seen) :]
        suffixes = [given_text[start:] for start in range(len(given_text))]
        beginnings = [text for text in suffixes if any(stop.startswith(text) and stop != text for stop in stops)]
        assert held == max(beginnings, key=len, default="")
