# SPDX-License-Identifier: Apache-2.0
"""Compile files of JSONSchemaBench, each in a process of its own, and try their examples.

python tests/shared/schema_bench.py FOLDER prints a line of JSON for each file that schema_bench.txt names.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from automata import PlainAutomaton
from blink.errors import BadRequestError
from blink.grammar.compiler import compile_structured
from blink.structured_outputs import StructuredOutputsParams
from value_walks import TooManyOrdersError, walks, without_undeclared

_NAMES = Path(__file__).with_name("schema_bench.txt")
_MAX_SECONDS = 20  # of a core, beyond which a file is given up


def read_names() -> list[str]:
    """Return the names of the files to try."""
    return [line for line in _NAMES.read_text().splitlines() if not line.startswith("#")]


def measure(path: Path) -> dict[str, Any]:
    """Return what compiling a file's schema cost, and which of its examples were judged how."""
    case = json.loads(path.read_text())
    found: dict[str, Any] = {"name": path.name, "refusal": None}
    memory, began = _peak_mib(), time.process_time()
    automaton = None
    try:
        automaton = compile_structured(StructuredOutputsParams(json=case["schema"])).data
    except BadRequestError as refusal:
        found["refusal"] = refusal.message
    except Exception as error:  # what no request may meet: told by the test
        found["refusal"] = found["failure"] = repr(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    found |= {"seconds": time.process_time() - began, "mib": _peak_mib() - memory}
    if automaton is None:
        return found
    found |= {"bytes": len(automaton), "valid": 0, "undeclared": [], "missed": [], "let_through": [], "undecided": []}
    plain = PlainAutomaton(automaton)
    for index, example in enumerate(case["tests"]):
        try:
            _judge(plain, example, index, found)
        except TooManyOrdersError:
            found["undecided"].append(index)
    return found


def _judge(automaton: PlainAutomaton, example: Any, index: int, found: dict[str, Any]) -> None:
    value = example["data"]
    is_written = walks(automaton, value)
    if not example["valid"]:
        found["let_through"] += [index] if is_written else []
    elif is_written:
        found["valid"] += 1
    else:
        found["undeclared" if _is_undeclared(automaton, value) else "missed"].append(index)


def _is_undeclared(automaton: PlainAutomaton, value: Any) -> bool:
    """Say whether a value could be written but for members that its schema does not declare."""
    try:
        declared = without_undeclared(automaton, value)
        return declared != value and walks(automaton, declared)
    except TooManyOrdersError:
        return False


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _measure_in_time(path: Path) -> dict[str, Any]:
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, _MAX_SECONDS)
    try:
        return measure(path)
    except Exception as error:
        return {"name": path.name, "refusal": repr(error), "failure": repr(error), "seconds": _MAX_SECONDS, "mib": 0}


def _give_up(*_: object) -> None:
    raise TimeoutError(f"more than {_MAX_SECONDS} s of a core")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for result in pool.imap(_measure_in_time, [folder / name for name in read_names()], chunksize=1):
            print(json.dumps(result), flush=True)
