# SPDX-License-Identifier: Apache-2.0
"""A request's sequences are submitted all or none, before anybody prepares the answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink.api.serving.poller import Poller
from blink.api.serving.session import Session
from blink.api.serving.stream import NonStreamingResult
from blink.errors import OverloadedError
from blink.request.planner import Plan, PlannedSequence
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation
from blink.text.tokenizer import NoTokenizer


class FakePoller:
    """Stands for the poller, its table and its metrics; submits up to a limit."""

    def __init__(self, limit: int = 9) -> None:
        self.table = self.metrics = self
        self.limit = limit
        self.entered = 0
        self.open: list[int] = []
        self.observed: dict[str, float] = {}

    def enter(self, flow: int, num_sequences: int) -> None:
        del flow
        self.entered += num_sequences

    def leave(self, flow: int, num_sequences: int) -> None:
        del flow
        self.entered -= num_sequences

    def submit(self, owner: Session, planned: PlannedSequence) -> int:
        del owner, planned
        if len(self.open) == self.limit:
            raise OverloadedError("full")
        self.open.append(len(self.open))
        return self.open[-1]

    def cancel(self, sequence: int, reason: str) -> None:
        del reason
        self.open.remove(sequence)

    def of(self, engine: int) -> FakePoller:
        assert engine == 0
        return self

    def observe(self, name: str, value: float) -> None:
        self.observed[name] = value


def session_of(poller: FakePoller, num_sequences: int) -> Session:
    params = SamplingParams(n=num_sequences)
    sequences = [
        PlannedSequence(cast(Any, None), params, 0, (), Generation(i, NoTokenizer(), params, ()))
        for i in range(num_sequences)
    ]
    return Session(cast(Poller, poller), Plan([], sequences, num_sequences), arrived=0.0)


def open_result() -> NonStreamingResult:
    return NonStreamingResult(cast(Any, None))


def test_the_responder_is_opened_when_all_is_submitted() -> None:
    poller = FakePoller()
    seen: list[list[int]] = []

    def open_responder() -> Any:
        seen.append(list(poller.open))
        return SimpleNamespace()

    session_of(poller, 3).start(open_responder)
    assert seen == [[0, 1, 2]] and poller.entered == 3


def test_without_room_for_all_none_is_left_and_nothing_opened() -> None:
    poller = FakePoller(limit=2)
    with pytest.raises(OverloadedError):
        session_of(poller, 3).start(open_result)  # which would fail here, without an event loop
    assert poller.open == [] and poller.entered == 0


def test_a_responder_that_cannot_be_opened_leaves_no_sequence() -> None:
    poller = FakePoller()
    with pytest.raises(RuntimeError, match="no running event loop"):
        session_of(poller, 3).start(open_result)
    assert poller.open == [] and poller.entered == 0


def test_the_end_of_the_last_sequence_ends_the_request_once() -> None:
    poller, ends = FakePoller(), list[Any]()
    session = session_of(poller, 2)
    session.on_end = ends.append
    closed: list[Any] = []
    responder: Any = SimpleNamespace(update=lambda _: None, close=closed.append)
    session.start(lambda: responder)
    for generation, count in zip(session.generations, (3, 5), strict=True):
        assert closed == ends == []
        for token in range(count):
            generation.add_token(token, 0.0, 0)
        generation.finish("length")
        session.note_change(generation)
        session.flush()
    session.flush()
    session.fail(OverloadedError("late"))
    assert closed == ends == [None] and poller.entered == 0
    assert poller.observed["request_max_num_generation_tokens"] == 5
