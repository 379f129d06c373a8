# SPDX-License-Identifier: Apache-2.0
"""A call of LLM: the engine has the first prompts before the last is planned, and outputs are made meanwhile."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink.errors import BadRequestError, EngineUnavailableError
from blink.offline.call_loop import CallLoop
from blink.offline.calls import Call, Request
from blink.offline.local_engine import LocalEngine
from blink.request.planner import Plan
from blink.request.table import SequenceTable

MANY = 100


class EngineDouble:
    """Ends a few sequences each time its completions are taken: those that it got first, or last."""

    def __init__(self, per_drain: int, *, last_first: bool = False) -> None:
        self.log: list[str] = []
        self.open: deque[Any] = deque()
        self.looks = 0
        self.owners: list[Call] = []
        self._per_drain = per_drain
        self._end = self.open.pop if last_first else self.open.popleft
        self.client = self

    def fileno(self) -> int:
        """Never be asked for a file: the loop's select is replaced."""
        raise AssertionError

    def await_ready(self) -> None:
        """Count the looks."""
        self.looks += 1

    def tick(self) -> None:
        """Renew nothing."""

    @property
    def num_open(self) -> int:
        """Return how many sequences have not ended."""
        return len(self.open)

    def submit(self, call: Call, planned: Any) -> int:
        """Take a sequence."""
        self.log.append(f"submit {planned.name}")
        self.open.append(planned)
        self.owners.append(call)
        return len(self.log)

    def cancel(self, sequence: int, reason: str) -> None:  # noqa: ARG002
        """Drop everything."""
        self.open.clear()

    def drain(self) -> None:
        """End some sequences."""
        for _ in range(min(self._per_drain, len(self.open))):
            self._end().generation.finish_reason = "stop"


def run(engine: EngineDouble, count: int, monkeypatch: pytest.MonkeyPatch, wrong: int = -1) -> list[str]:
    """Run a call of so many prompts, of which one may be wrong; two sequences each."""
    monkeypatch.setattr("blink.offline.call_loop.select.select", lambda *_: None)

    def plan(request: Request) -> Plan:
        name = cast("Any", request).name
        engine.log.append(f"plan {name}")
        if name == wrong:
            raise BadRequestError("wrong")
        sequences = [SimpleNamespace(name=name, generation=SimpleNamespace(finish_reason=None)) for _ in range(2)]
        return cast("Plan", SimpleNamespace(sequences=sequences))

    def finish(request: Request, plan: Plan) -> str:
        assert all(one.generation.finish_reason == "stop" for one in plan.sequences)
        engine.log.append(f"finish {cast('Any', request).name}")
        return str(cast("Any", request).name)

    table = cast("SequenceTable", engine)
    requests = cast("list[Request]", [SimpleNamespace(name=name) for name in range(count)])
    return CallLoop(cast("LocalEngine", engine), table).run(requests, plan, Call(table, SimpleNamespace()), finish)


def test_the_engine_computes_while_others_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineDouble(per_drain=5)
    assert run(engine, MANY, monkeypatch) == [str(name) for name in range(MANY)]
    log = engine.log
    assert log[:3] == ["plan 0", "submit 0", "submit 0"]
    assert log.index("finish 0") < log.index(f"plan {MANY - 1}") < log.index(f"finish {MANY - 1}")
    assert engine.looks == 1  # the lease is renewed by time, not for each prompt


def test_outputs_come_in_order_whoever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(EngineDouble(per_drain=1, last_first=True), 3, monkeypatch) == ["0", "1", "2"]


def test_a_wrong_prompt_takes_the_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineDouble(per_drain=0)
    with pytest.raises(BadRequestError):
        run(engine, 4, monkeypatch, wrong=3)
    assert engine.num_open == 0 and "submit 2" in engine.log and "finish 0" not in engine.log


def test_a_lost_engine_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences are nobody's then: the call must not end as if they had answered."""
    engine = EngineDouble(per_drain=0)

    def lose() -> None:
        owner = next(iter(engine.owners), None)
        if owner is not None:
            owner.fail(EngineUnavailableError("lost"))

    monkeypatch.setattr(engine, "drain", lose)
    with pytest.raises(EngineUnavailableError, match="lost"):
        run(engine, 2, monkeypatch)


def test_a_call_of_no_prompts_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(EngineDouble(per_drain=1), 0, monkeypatch) == []
