# SPDX-License-Identifier: Apache-2.0
"""Stands for the compiler of structured outputs in its child process: what it does is what it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.structured_outputs import StructuredOutputsParams

PLACE = "stub_compiler:compile_stub"
_MIB = 1 << 20
_done: list[str] = []
_kept: list[bytes] = []


def compile_stub(params: StructuredOutputsParams) -> Automaton:
    """Do the first word of the regex; return this process's id, and which compilation that was of its."""
    assert params.regex is not None
    _WORK.get(params.regex.split()[0], lambda: None)()
    _done.append(params.regex)
    return Automaton(f"{os.getpid()} {len(_done)}".encode())


def _spin() -> None:
    while True:
        pass


def _spin_deafly() -> None:
    while True:
        try:
            _spin()
        except BaseException:
            continue


def _refuse() -> None:
    raise BadRequestError("This is no form.", "structured_outputs")


def _work_a_little() -> None:
    for _ in range(1_500_000):
        pass


_WORK: dict[str, Callable[[], object]] = {
    "spin": _spin,
    "spin_deafly": _spin_deafly,
    "work": _work_a_little,
    "compute": lambda: 7 ** (1 << 24) % 10**4000,  # one operation, which no signal interrupts
    "allocate": lambda: [bytes(_MIB) for _ in range(4096)],
    "keep": lambda: _kept.append(bytes(20 * _MIB)),
    "exit": lambda: os._exit(3),
    "refuse": _refuse,
    "fail": lambda: {}["a secret"],
}
