# SPDX-License-Identifier: Apache-2.0
"""Stop strings in growing text, against a search that looks at one character after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink.errors import BadRequestError
from blink.sampling_params import MAX_STOP_CHARS, MAX_STOPS, SamplingParams
from blink.text.stop_strings import StopAutomaton, StopMatcher

PIECES = st.lists(st.text("ab\U0010ffff", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab\U0010ffff", min_size=1, max_size=6), min_size=1, max_size=5)


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


@pytest.mark.parametrize("stops", [["lo", "hello", "o"], ["o", "lo", "hello"], ["hello", "o"]])
@pytest.mark.parametrize("pieces", [["say hello!"], list("say hello!"), ["say hel", "lo!"]])
def test_of_stop_strings_that_end_together_the_longest_is_cut(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops, False) == ("say ", "hello")
    assert run(pieces, stops, True) == ("say hello", "hello")


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


class Counter(dict[int, int]):
    """Edges that count how often they are looked at."""

    looks = 0

    def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        ([" " * (MAX_STOP_CHARS - 1) + "x"], " " * 40_000),
        ([" " * length + "x" for length in range(1, 120)], " " * 40_000),
        ([" " * (100 + i) + chr(0x4E00 + i) for i in range(64)], " " * 40_000),
        (["ab" * 4000 + "c", "b" + "ab" * 3000 + "d"], "ab" * 20_000),
    ],
)
def test_the_work_grows_with_the_text_and_not_with_the_stop_strings(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops, include=False)
    automaton = StopAutomaton(stops)
    automaton.edges = counter = Counter(automaton.edges)
    matcher._automaton = automaton
    pushed = "".join(matcher.push(text[start : start + 5]) for start in range(0, len(text), 5))
    assert matcher.matched is None
    assert pushed + matcher.finish() == text
    # Each fallback leaves a state that an earlier character led to.
    assert counter.looks <= 2 * len(text)


def test_building_is_linear_in_the_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    fallback = StopAutomaton.advance

    def advance(self: StopAutomaton, state: int, character: int) -> int:
        nonlocal steps
        steps += 1
        return fallback(self, state, character)

    monkeypatch.setattr(StopAutomaton, "advance", advance)
    stops = ["a" * 127 + chr(0x4E00 + i) for i in range(128)]
    assert sum(map(len, stops)) == MAX_STOP_CHARS
    automaton = StopAutomaton(stops)
    assert steps <= MAX_STOP_CHARS
    assert len(automaton.edges) == 127 + 128


def test_sequences_that_stop_alike_share_their_automaton() -> None:
    first, second = (StopMatcher(["one", "two"], include=False) for _ in range(2))
    assert first._automaton is second._automaton


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["x"] * (MAX_STOPS + 1), f"at most {MAX_STOPS} strings, got {MAX_STOPS + 1}"),
        (["x" * MAX_STOP_CHARS, "y"], f"at most {MAX_STOP_CHARS} characters in sum, got {MAX_STOP_CHARS + 1}"),
    ],
)
def test_more_or_longer_stop_strings_are_refused(stop: list[str], message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        SamplingParams(stop=stop)
    assert caught.value.param == "stop"
    SamplingParams(stop=["x" * (MAX_STOP_CHARS // MAX_STOPS)] * MAX_STOPS)
