# SPDX-License-Identifier: Apache-2.0
"""What requests ask of their text's form is compiled beside this process: in turn, in time, and not for nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blink.errors import BadRequestError, BlinkError, ClientLimitError, OverloadedError
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.request import automata, compilation, lane
from blink.request.automata import AutomatonCache, name_ask
from blink.request.compilation import Client, Compilation
from blink.request.lane import Pace
from blink.request.turns import Turns
from blink.structured_outputs import StructuredOutputsParams
from processes import children_of
from stub_compiler import PLACE

QUICK = Pace(cpu_seconds=0.05, niceness=0, is_ready=True)
BRIEF = Pace(cpu_seconds=0.05, niceness=0, is_ready=False)
ENDLESS = Pace(cpu_seconds=600, niceness=0, is_ready=False)
LIMIT = 60  # seconds, on a machine that does much else


@pytest.fixture(autouse=True)
def stub_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "shared"))


class Leaver:
    """A client that can leave."""

    def __init__(self, flow: int) -> None:
        self.client = Client(flow, self._on_leave)
        self._callbacks: list[Callable[[BlinkError], None]] = []

    def leave(self) -> None:
        for call_back in self._callbacks:
            call_back(BlinkError("gone"))

    @contextmanager
    def _on_leave(self, callback: Callable[[BlinkError], None]) -> Iterator[None]:
        self._callbacks.append(callback)
        yield
        self._callbacks.remove(callback)


def ask(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


class Desk:
    """Clients of one service, and the order in which they were answered."""

    def __init__(self, service: Compilation) -> None:
        self.service = service
        self.answered: list[str] = []

    async def compile(self, text: str, flow: int = 1) -> str:
        try:
            automaton = await self.service.compile(ask(text), Leaver(flow).client)
        finally:
            self.answered.append(text)
        return automaton.data.decode()

    def begin(self, text: str, flow: int = 1) -> asyncio.Task[str]:
        return asyncio.create_task(self.compile(text, flow))


def run(*paces: Pace, script: Callable[[Desk], Awaitable[None]], compiler: str = PLACE) -> None:
    async def play() -> None:
        service = Compilation(paces, compiler)
        try:
            await asyncio.wait_for(script(Desk(service)), LIMIT)
        finally:
            service.close()
            await asyncio.wait_for(until(lambda: not children()), LIMIT)

    asyncio.run(play())


def children() -> set[int]:
    return set(children_of(os.getpid(), "blink.request.compile_child"))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_the_child_compiles_as_this_process_would_and_known_forms_need_no_child() -> None:
    wrong = StructuredOutputsParams(json={"$ref": "https://elsewhere/schema"})

    async def play() -> None:
        service = Compilation()
        try:
            found = await service.compile(ask("[0-7]{3}|x"), Leaver(1).client)
            assert found.data == compile_structured(ask("[0-7]{3}|x")).data
            for _ in range(2):
                with pytest.raises(BadRequestError, match="cannot be compiled") as caught:
                    await service.compile(wrong, Leaver(1).client)
                assert caught.value.param == "structured_outputs"
                service.close()
            await until(lambda: not children())
            assert await service.compile(ask("[0-7]{3}|x"), Leaver(2).client) is found
            assert not children()
        finally:
            service.close()

    asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_a_form_that_takes_long_moves_aside_and_quick_ones_go_by() -> None:
    async def script(desk: Desk) -> None:
        endless = desk.begin("spin")
        for number in range(3):
            await desk.compile(f"quick {number}")
        assert not endless.done()
        await until(lambda: len(children()) >= 2)
        assert await desk.compile("quick 3") and not endless.done()
        endless.cancel()
        await until(lambda: len(children()) == 1)  # the slow one leaves when there is nothing to do

    run(QUICK, ENDLESS, script=script)


def test_what_overruns_every_lane_is_refused_once_and_for_all() -> None:
    async def script(desk: Desk) -> None:
        with pytest.raises(BadRequestError, match="too much time") as caught:
            await desk.compile("spin")
        assert caught.value.param == "structured_outputs"
        desk.service.close()
        with pytest.raises(BadRequestError, match="too much time"):
            await desk.compile("spin")

    run(BRIEF, BRIEF, script=script)


def test_clients_take_turns() -> None:
    async def script(desk: Desk) -> None:
        tasks = [desk.begin(f"work {number}", flow=1) for number in range(8)]
        await asyncio.sleep(0)
        tasks.append(desk.begin("honest", flow=2))
        await asyncio.gather(*tasks)
        assert desk.answered.index("honest") <= 2

    run(ENDLESS, script=script)


def test_who_joins_a_form_that_another_clients_queue_holds_has_it_in_its_own_turn() -> None:
    async def script(desk: Desk) -> None:
        tasks = [desk.begin(f"work {number}", flow=1) for number in range(8)]
        tasks.append(desk.begin("work of a longer name", flow=1))
        await asyncio.sleep(0)
        joined = desk.begin("work of a longer name", flow=2)
        await asyncio.gather(*tasks, joined)
        assert desk.answered.index("work of a longer name") <= 2
        assert joined.result() == tasks[-1].result()

    run(ENDLESS, script=script)


def test_turns_are_by_client_and_a_clients_lightest_goes_first() -> None:
    turns = Turns[str](len)
    for text in ("aaa", "a", "aa"):
        turns.add(1, text)
    for text in ("bbbb", "aa"):
        turns.add(2, text)
    turns.add(3, "never")
    turns.discard(3, "never")
    assert [turns.take() for _ in range(5)] == ["a", "aa", "aaa", "bbbb", None]


def test_forms_that_are_asked_for_at_once_are_compiled_once() -> None:
    async def script(desk: Desk) -> None:
        tasks = [desk.begin("work", flow) for flow in (1, 1, 2, 3)]
        assert len({await task for task in tasks}) == 1
        assert (await desk.compile("other")).split()[1] == "2"

    run(ENDLESS, script=script)


def test_a_client_that_leaves_takes_its_forms_along() -> None:
    async def script(desk: Desk) -> None:
        await desk.compile("first")
        leaver = Leaver(1)
        left = [
            asyncio.create_task(desk.service.compile(ask(text), leaver.client))
            for text in ("spin", "spin too", "exit", "exit too")
        ]
        cancelled = desk.begin("spin further")
        honest = desk.begin("honest", flow=2)
        await asyncio.sleep(0)
        leaver.leave()
        cancelled.cancel()
        assert (await honest).split()[1] == "2"
        assert [str(error) for error in await asyncio.gather(*left, return_exceptions=True)] == ["gone"] * 4
        assert (await desk.compile("later")).split()[1] == "3"  # of the same child: nothing was killed

    run(ENDLESS, script=script)


def test_a_form_is_stopped_only_when_nobody_waits_for_it_and_is_begun_anew_for_the_next() -> None:
    async def script(desk: Desk) -> None:
        await desk.compile("before")
        leaver, other = Leaver(1), Leaver(2)
        first = asyncio.create_task(desk.service.compile(ask("spin"), leaver.client))
        second = asyncio.create_task(desk.service.compile(ask("spin"), other.client))
        behind = desk.begin("behind", flow=3)
        await asyncio.sleep(0)
        leaver.leave()
        with pytest.raises(BlinkError, match="gone"):
            await first
        assert not second.done() and not behind.done()
        other.leave()
        third = desk.begin("spin", flow=4)
        await behind
        assert not third.done()
        with pytest.raises(BlinkError, match="gone"):
            await second

    run(ENDLESS, script=script)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compute", "too much time"),
        ("spin_deafly", "too much time"),
        ("exit", "too much memory or time"),
        ("allocate", "too much memory"),
    ],
)
def test_a_child_that_must_end_is_replaced(text: str, words: str) -> None:
    async def script(desk: Desk) -> None:
        with pytest.raises(BadRequestError, match=words) as caught:
            await desk.compile(text)
        assert caught.value.param == "structured_outputs"
        assert (await desk.compile("next")).split()[1] == "1"  # of another child

    run(BRIEF, script=script)


def test_what_the_compiler_should_not_raise_is_a_refusal_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(desk: Desk) -> None:
        for text, words in (("refuse", "This is no form"), ("fail", "cannot be compiled")):
            with pytest.raises(BadRequestError, match=words) as caught:
                await desk.compile(text)
            assert caught.value.param == "structured_outputs" and "secret" not in caught.value.message
        assert "a secret" in caplog.text and "no form" not in caplog.text
        assert await desk.compile("next")

    run(BRIEF, script=script)


def test_no_depth_of_nesting_is_an_error_of_the_server() -> None:
    async def script(desk: Desk) -> None:
        words = set[str]()
        deep: Any = {}
        for depth in range(1, 1001):
            deep = {"not": deep}
            if depth % 50 == 0:
                with pytest.raises(BadRequestError) as caught:
                    await desk.service.compile(StructuredOutputsParams(json=deep), Leaver(1).client)
                words.add(caught.value.message)
        assert any("nested too deeply" in message for message in words)

    run(BRIEF, script=script)


def test_memory_that_is_left_behind_ends_a_child() -> None:
    async def script(desk: Desk) -> None:
        first, second, third = [await desk.compile(text) for text in ("small", "keep", "next")]
        assert first.split()[0] == second.split()[0] != third.split()[0]

    run(ENDLESS, script=script)


def test_a_machine_that_gives_a_child_no_time_is_not_the_forms_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(desk: Desk) -> None:
        os.kill(int((await desk.compile("first")).split()[0]), signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(lane, "_STALL_SECONDS", 0.0)
            with pytest.raises(OverloadedError, match="too busy"):
                await desk.compile("second")
        assert await desk.compile("second")

    run(QUICK, script=script)


def test_a_client_can_let_only_so_many_forms_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_MAX_CLIENT_JOBS", 3)
    monkeypatch.setattr(compilation, "_MAX_JOBS", 5)

    async def script(desk: Desk) -> None:
        tasks = [desk.begin(f"a{number}", flow=1) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ClientLimitError):
            await desk.compile("a3", flow=1)
        tasks += [desk.begin("a2", flow=1), *(desk.begin(f"b{number}", flow=2) for number in range(2))]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await desk.compile("c", flow=3)
        await asyncio.gather(*tasks)
        assert await desk.compile("a3", flow=1)

    run(ENDLESS, script=script)


_PARENT = """
import asyncio
from contextlib import nullcontext
from blink.request.compilation import Client, Compilation
from blink.structured_outputs import StructuredOutputsParams

async def main():
    service = Compilation(compiler="stub_compiler:compile_stub")
    client = Client(1, lambda _: nullcontext())
    print((await service.compile(StructuredOutputsParams(regex="quick"), client)).data.decode(), flush=True)
    await asyncio.gather(*(service.compile(StructuredOutputsParams(regex="spin"), client) for _ in range(2)))

asyncio.run(main())
"""


def test_children_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[0])
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    deadline = time.monotonic() + LIMIT
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_automata_are_kept_while_there_is_room() -> None:
    cache = AutomatonCache(max_bytes=2000)
    first = ask("a+")
    known = cache.compile(first)
    assert cache.find(name_ask(first).key) is known and cache.compile(ask("a+")) is known
    for index in range(20):
        cache.compile(ask(f"b{index}"))
    assert cache.find(name_ask(first).key) is None


def test_what_cannot_be_compiled_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[StructuredOutputsParams] = []

    def compile_counted(params: StructuredOutputsParams) -> Automaton:
        tries.append(params)
        return compile_structured(params)

    monkeypatch.setattr(automata, "compile_structured", compile_counted)
    cache = AutomatonCache(max_bytes=4096)
    wrong = StructuredOutputsParams(json={"$ref": "https://elsewhere/schema"})
    for _ in range(2):
        with pytest.raises(BadRequestError, match="cannot be compiled"):
            cache.compile(wrong)
    assert tries == [wrong]
    for number in range(5):  # refusals make room too
        with pytest.raises(BadRequestError):
            cache.compile(StructuredOutputsParams(json={"$ref": f"https://elsewhere/{number}"}))
    assert cache.find(name_ask(wrong).key) is None
