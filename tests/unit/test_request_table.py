# SPDX-License-Identifier: Apache-2.0
"""The table of sequences in front of an engine that answers what the test says."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from blink.errors import BlinkError, EngineUnavailableError
from blink.link.client import EngineClient, RegionInfo
from blink.link.queue_pair import NO_ORIGIN
from blink.region.layout import COMPLETION, VECTOR_CQE, CqeKind, FinishReason, RejectCode, Task
from blink.request.planner import PlannedSequence
from blink.request.table import Observer, OpenSequence, SequenceTable
from blink.sampling_params import SamplingParams
from blink.text.generation import Generation
from blink.text.prompt import Prompt
from blink.text.tokenizer import NoTokenizer
from fake_engine import ENGINE

Row = dict[str, Any]


class FakeClient:
    """Takes submissions and answers with the rows that it is given."""

    info: RegionInfo | None = None

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.cancelled: list[int] = []
        self.lost: str | None = None
        self._next = 10

    def submit(self, prompt: Any, params: SamplingParams, **options: Any) -> int:
        del prompt, params, options
        self._next += 1
        return self._next

    def cancel(self, sequence: int) -> None:
        self.cancelled.append(sequence)

    def tick(self) -> str | None:
        return self.lost

    def drain(self) -> Any:
        found = np.zeros(len(self.rows), COMPLETION)
        for place, row in enumerate(self.rows):
            for name, value in row.items():
                found[place][name] = value
        self.rows = []
        return found


class Request:
    """An owner that notes what it is told."""

    def __init__(self) -> None:
        self.arrived = time.perf_counter()
        self.flow = 0
        self.told: list[object] = []
        self.breaks = ""

    def note_change(self, generation: Generation) -> None:
        if self.breaks == "change":
            raise ValueError("broken")
        self.told.append(generation.num_tokens)

    def flush(self) -> None:
        if self.breaks == "flush":
            raise ValueError("broken")
        self.told.append("flush")

    def fail(self, error: BlinkError, reason: str = "error") -> None:
        self.told.append((type(error), error.message, reason))


class Notes(Observer):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def note_admission(self, opened: OpenSequence) -> None:
        self.seen.append(("admitted", opened.num_prompt_tokens))

    def note_token(self, opened: OpenSequence, time_ns: int) -> None:
        del opened
        self.seen.append(time_ns)

    def note_end(self, opened: OpenSequence, reason: str) -> None:
        del opened
        self.seen.append(reason)


class Fixture:
    def __init__(self) -> None:
        self.client, self.notes = FakeClient(), Notes()
        self.table = SequenceTable(cast(EngineClient, self.client), self.notes)

    def submit(self, owner: Request, **params: Any) -> tuple[int, Generation]:
        settings = SamplingParams(**params)
        generation = Generation(0, NoTokenizer(), settings, ())
        prompt = Prompt(np.array([1, 2, 3], np.int32), b"", NO_ORIGIN)
        return self.table.submit(owner, PlannedSequence(prompt, settings, 0, (), generation)), generation

    def answer(self, *rows: Row) -> None:
        self.client.rows = list(rows)
        self.table.drain()


@pytest.fixture
def engine() -> Fixture:
    return Fixture()


def token(sequence: int, value: int, reason: int = 0, **fields: Any) -> Row:
    return {"sequence": sequence, "kind": CqeKind.TOKEN, "token": value, "finish_reason": reason, **fields}


def test_first_tokens_are_passed_on_before_all_others(engine: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [Request() for _ in range(4)]
    sequences = [engine.submit(owner)[0] for owner in owners]
    engine.answer(token(sequences[0], 5), token(sequences[2], 5))
    flushed: list[Request] = []
    monkeypatch.setattr(Request, "flush", lambda self: flushed.append(self))
    engine.answer(*(token(sequence, 6) for sequence in sequences))
    assert flushed == [owners[1], owners[3], owners[0], owners[2]]


def test_tokens_reach_their_generation_and_the_last_one_ends_it(engine: Fixture) -> None:
    owner = Request()
    sequence, generation = engine.submit(owner, logprobs=1)
    assert (engine.table.num_open, engine.table.num_waiting) == (1, 1)
    engine.answer(
        {"sequence": sequence, "kind": CqeKind.ADMITTED, "token": 2},
        {"sequence": sequence, "kind": CqeKind.TOP_LOGPROB, "token": 8, "logprob": -0.5},
        token(sequence, 7, time_ns=100, logprob=-1.0),
    )
    assert (engine.table.num_open, engine.table.num_waiting, generation.cached_tokens) == (1, 0, 2)
    engine.answer({"sequence": sequence, "kind": CqeKind.ADMITTED, "token": 3})  # back from a preemption
    assert (engine.table.num_waiting, generation.cached_tokens) == (0, 2)
    engine.answer(token(sequence, 9, FinishReason.LENGTH, time_ns=300, logprob=-2.0))
    taken = generation.take()
    assert taken.tokens == [7, 9]
    assert [(entry.token, entry.logprob, entry.top) for entry in taken.logprobs] == [
        (7, -1.0, [(8, -0.5)]),
        (9, -2.0, []),
    ]
    assert generation.finish_reason == "length"
    assert owner.told == [1, "flush", "flush", 2, "flush"]
    assert engine.notes.seen == [("admitted", 3), 100, 300, "length"]
    assert (engine.table.num_open, engine.client.cancelled) == (0, [])


def test_an_end_that_only_the_text_knows_is_told_to_the_engine(engine: Fixture) -> None:
    sequence, generation = engine.submit(Request())
    generation.finish("stop")  # as a stop string does
    engine.answer(token(sequence, 7))
    assert engine.client.cancelled == [sequence]
    assert engine.table.num_open == engine.table.num_waiting == 0
    engine.answer({"sequence": sequence, "kind": CqeKind.FINISHED, "finish_reason": FinishReason.ABORT})
    assert engine.notes.seen[1:] == ["stop"]


def test_an_end_without_a_token_has_the_engines_reason(engine: Fixture) -> None:
    owner = Request()
    sequence, generation = engine.submit(owner)
    engine.answer({"sequence": sequence, "kind": CqeKind.FINISHED, "finish_reason": FinishReason.ERROR})
    assert (generation.finish_reason, owner.told, engine.notes.seen) == ("error", [0, "flush"], ["error"])


@pytest.mark.parametrize("code", [code for code in RejectCode if code != RejectCode.NONE])
def test_a_rejection_fails_its_request_by_name(engine: Fixture, code: RejectCode) -> None:
    owner, other = Request(), Request()
    sequence, _ = engine.submit(owner)
    engine.submit(other)
    engine.answer({"sequence": sequence, "kind": CqeKind.REJECTED, "token": code, "finish_reason": FinishReason.ERROR})
    unavailable = {
        RejectCode.DRAINING: "The engine is shutting down.",
        RejectCode.ADAPTER: "The adapter has just left the engine's memory. Retry.",
    }
    expected = (
        (EngineUnavailableError, unavailable[code], "error")
        if code in unavailable
        else (BlinkError, f"The engine rejected the request: {code.name}.", "error")
    )
    assert owner.told[0] == expected
    assert (other.told, engine.table.num_open, engine.table.num_waiting) == ([], 1, 1)


def test_a_loss_fails_each_request_once(engine: Fixture) -> None:
    first, second = Request(), Request()
    for owner in (first, first, second):
        engine.submit(owner)
    assert engine.table.tick() is None
    engine.client.lost = "gone"
    assert engine.table.tick() == "gone"
    assert first.told == second.told == [(EngineUnavailableError, "The request was lost: gone.", "error")]


def test_what_is_cancelled_is_nobodys(engine: Fixture) -> None:
    owner = Request()
    sequence, generation = engine.submit(owner)
    engine.table.cancel(sequence, "abort")
    engine.table.cancel(sequence, "abort")
    engine.answer(token(sequence, 7), token(999, 7))
    assert (owner.told, generation.num_tokens, engine.client.cancelled) == ([], 0, [sequence])
    assert (engine.table.num_open, engine.table.num_waiting, engine.notes.seen) == (0, 0, ["abort"])


@pytest.mark.parametrize("where", ["change", "flush"])
def test_a_request_that_breaks_fails_alone(engine: Fixture, where: str) -> None:
    broken, sound = Request(), Request()
    broken.breaks = where
    sequences = [engine.submit(owner)[0] for owner in (broken, sound)]
    engine.answer(*(token(sequence, 7) for sequence in sequences))
    assert (BlinkError, "Internal error: ValueError.", "error") in broken.told
    assert sound.told == [1, "flush"]


def parts_of(sequence: int, first: int, *values: float) -> Any:
    """Return the completions of a part of a vector, which begins at a place of it."""
    rows = np.zeros(len(values) // 4, COMPLETION)
    rows["sequence"], rows["kind"] = sequence, CqeKind.VECTOR
    vectors = rows.view(VECTOR_CQE)
    vectors["index"] = first + 4 * np.arange(len(rows))
    vectors["values"] = np.reshape(values, (-1, 4))
    return rows


class CountingTokenizer(NoTokenizer):
    """Remembers the prompts whose ends it has looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def open_detokenizer(self, **options: Any) -> Any:
        self.seen.append([*options["before"]])
        return super().open_detokenizer(**options)


def test_the_end_of_a_prompt_is_looked_at_once_and_not_before_it_is_submitted() -> None:
    tokenizer, table, settings = CountingTokenizer(), Fixture().table, SamplingParams()
    generation = Generation(0, tokenizer, settings, (), [1, 2, 3])
    assert tokenizer.seen == []
    prompt = Prompt(np.array([1, 2, 3], np.int32), b"", NO_ORIGIN)
    table.submit(Request(), PlannedSequence(prompt, settings, 0, (), generation))
    generation.add_token(4, 0.0, 0)
    assert tokenizer.seen == [[1, 2, 3]]


class VectorClient(FakeClient):
    """Answers with parts of vectors."""

    info = replace(ENGINE, task=Task.EMBED, vector_width=4)

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def drain(self) -> Any:
        return np.concatenate(self.batches.pop(0)) if self.batches else np.zeros(0, COMPLETION)


def planned() -> PlannedSequence:
    settings = SamplingParams()
    prompt = Prompt(np.array([1, 2, 3], np.int32), b"", NO_ORIGIN)
    return PlannedSequence(prompt, settings, 0, (), Generation(0, NoTokenizer(), settings, ()))


def test_vectors_of_several_sequences_arrive_in_parts() -> None:
    """One is cut between two batches; of one that was cancelled nothing is kept."""
    client = VectorClient()
    table = SequenceTable(cast(EngineClient, client), Observer())
    owner, plans = Request(), [planned(), planned()]
    first, second = (table.submit(owner, plan) for plan in plans)
    client.batches = [
        [parts_of(99, 0, 9, 9, 9, 9), parts_of(first, 0, 1, 2, 3, 4, 5, 6, 7, 8), parts_of(second, 0, 2, 2, 2, 2)],
        [parts_of(second, 4, 5, 5, 5, 5)],
    ]
    table.drain()
    table.drain()
    assert plans[0].generation.vector.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert plans[1].generation.vector.tolist() == [2, 2, 2, 2, 5, 5, 5, 5]
    assert table.num_open == 2


def test_a_part_that_does_not_follow_fails_its_request_alone() -> None:
    client = VectorClient()
    table = SequenceTable(cast(EngineClient, client), Observer())
    owners, plans = [Request(), Request()], [planned(), planned()]
    first, second = (table.submit(owner, plan) for owner, plan in zip(owners, plans, strict=True))
    client.batches = [[parts_of(first, 4, 1, 2, 3, 4), parts_of(second, 0, 5, 6, 7, 8)]]
    table.drain()
    assert any("Internal error" in str(told) for told in owners[0].told)
    assert plans[1].generation.vector.tolist() == [5, 6, 7, 8]
