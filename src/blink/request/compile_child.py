# SPDX-License-Identifier: Apache-2.0
"""The program of a child process that compiles what requests ask for, within limits of processor time and memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.host.child import Parent, limit_data, read_data_bytes
from blink.structured_outputs import StructuredOutputsParams

PARAM = "structured_outputs"
_MEMORY_BYTES = 256 << 20
_WORN_BYTES = 16 << 20  # that compiling may leave behind: a child that has more is replaced
_AGAIN_SECONDS = 0.05  # an exception of a signal may get lost, in a destructor for one

Compile = Callable[[StructuredOutputsParams], Automaton]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt to compile came to."""

    result: Automaton | BadRequestError | None  # None: it did not come to its end
    is_worn: bool = False  # the child should be replaced
    trouble: str = ""  # what the compiler should not have raised


class _Interruption(BaseException):
    """The time is over, or nobody waits any more. No Exception: nothing on its way catches it."""


class Attempts:
    """Call a function that a signal can end. One of each process, as signals are."""

    def __init__(self, function: Compile) -> None:
        self._function = function
        self._is_running = False
        for number in (signal.SIGPROF, signal.SIGUSR1):
            signal.signal(number, self._interrupt)

    def make(self, params: StructuredOutputsParams, seconds: float) -> Outcome:
        """Compile for so many seconds of processor time at most."""
        try:
            return Outcome(self._run(params, seconds))
        except _Interruption:
            return Outcome(None)
        except BadRequestError as refusal:
            return Outcome(BadRequestError(refusal.message, refusal.param))
        except MemoryError:
            return Outcome(BadRequestError("structured_outputs takes too much memory to compile.", PARAM), True)
        except Exception:
            refusal = BadRequestError("structured_outputs cannot be compiled.", PARAM)
            return Outcome(refusal, trouble=traceback.format_exc())
        finally:
            self._is_running = False

    def _run(self, params: StructuredOutputsParams, seconds: float) -> Automaton:
        self._is_running = True
        signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
        try:
            return self._function(params)
        finally:
            self._is_running = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _interrupt(self, *_: object) -> None:
        if self._is_running:
            raise _Interruption


def run(parent: Parent, name: str) -> None:
    """Answer the parent until it goes.

    Args:
        name: the function that compiles, as MODULE:FUNCTION.
    """
    module, _, function = name.partition(":")
    attempts = Attempts(getattr(importlib.import_module(module), function))
    gc.freeze()
    limit_data(_MEMORY_BYTES)
    most = read_data_bytes() + _WORN_BYTES
    release = ctypes.CDLL(None).malloc_trim
    parent.send(b"")
    while (message := parent.take()) is not None:
        params, seconds = pickle.loads(message)
        outcome = attempts.make(params, seconds)
        if read_data_bytes() > most:
            gc.collect()
            release(0)
        is_worn = outcome.is_worn or read_data_bytes() > most
        parent.send(pickle.dumps(Outcome(outcome.result, is_worn, outcome.trouble)))
