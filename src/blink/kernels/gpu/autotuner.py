# SPDX-License-Identifier: Apache-2.0
"""Which of several candidates to compute the same thing is the fastest here: timed while a server prepares its steps.

A file keeps which were chosen: a server that is started again computes the same bits.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from blink.kernels.gpu import cublas, cublas_lt
from blink.kernels.gpu.launch import is_compiling_ahead

logger = logging.getLogger("blink.engine")

_ROUNDS = 5
_MIN_GAIN = 0.03
_COLD_CACHES = 3  # their size in what is read to evict a weight
_HEAD_START = 50  # such reads, so that the host is never what is timed

R = TypeVar("R")
Candidate = Callable[[], object]
Choices = dict[str, str | None]  # of what is computed: a candidate's code, None: the first

_chosen: Choices = {}
_kept: Choices = {}  # what the file says
_is_tuning = False


def find(
    name: str, list_candidates: Callable[[], Mapping[str, Candidate]], accepts: Callable[[str], bool]
) -> str | None:
    """Return the code of the candidate that was chosen; None if that is the first, or nothing has been yet.

    list_candidates: returns candidates by their codes, the first before all others; accepts: tells whether a code,
    perhaps of another process, is that of a candidate.
    """
    if name not in _chosen and _is_tuning and not _is_only_noted():
        kept = _kept.get(name, "")
        _chosen[name] = kept if kept is None or (kept and accepts(kept)) else _choose(list_candidates())
    return _chosen.get(name)


def compute(name: str, candidates: Mapping[str, Callable[[], R]]) -> R:
    """Compute by the candidate that was chosen; by the first if none was. candidates: by their codes."""
    if is_compiling_ahead():
        for likely in map(candidates.__getitem__, list_likely(name, candidates)):
            likely()
    code = find(name, lambda: candidates, candidates.__contains__)
    chosen = candidates[code or next(iter(candidates))]
    return chosen()


def list_likely(name: str, codes: Iterable[str]) -> list[str]:
    """Return those of some candidates' codes that find() may return: what the file says, or all."""
    return [code for code in codes if _kept.get(name, code) == code]


def _is_only_noted() -> bool:
    """Tell whether what is launched does not run now."""
    return is_compiling_ahead() or torch.cuda.is_current_stream_capturing()


@contextmanager
def tuning(path: Path) -> Iterator[None]:
    """Within it, each thing that is computed for the first time gets its candidate; the file keeps them.

    A file that cannot be read or written costs a warning, and the choices are made anew at the next start.
    """
    global _is_tuning
    try:
        machine = name_machine()
    except OSError:
        yield  # reserve_sm() has said that there is no such library
        return
    _kept.update(_read(path, machine))
    _is_tuning = True
    try:
        yield
    finally:
        _is_tuning = False
    if not _chosen.items() <= _kept.items():
        _kept.update(_chosen)
        _write(path, machine, _kept)


def name_machine() -> str:
    """Return what choices depend on beside what is computed: the GPU and the library.

    Raises:
        OSError: there is no such library.
    """
    free = cublas.count_free_sms()
    return f"{torch.cuda.get_device_name()}, {free} SMs, cuBLASLt {cublas_lt.version()}"


def _choose(candidates: Mapping[str, Candidate]) -> str | None:
    """Return the code of the fastest candidate, None if the first is about as fast."""
    if len(candidates) < 2:
        return None
    times = _time(tuple(candidates.values()))
    best = min(times)
    return tuple(candidates)[times.index(best)] if best < times[0] * (1 - _MIN_GAIN) else None


def _time(candidates: tuple[Candidate, ...]) -> list[float]:
    """Return the milliseconds that each candidate takes with a weight that no cache holds, medians of some rounds."""
    for compute in candidates:
        compute()  # loads its code
    evictor = torch.zeros(_COLD_CACHES * torch.cuda.get_device_properties().L2_cache_size // 4, device="cuda")
    for _ in range(_HEAD_START):
        evictor.sum()
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in candidates]
    for _ in range(_ROUNDS):
        for own, compute in zip(pairs, candidates, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evictor.sum()
            start.record()
            compute()
            end.record()
            own.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in own) for own in pairs]


def _read(path: Path, machine: str) -> Choices:
    try:
        found = dict(json.loads(path.read_text()).get(machine, {}).items())
        if not all(code is None or isinstance(code, str) for code in found.values()):
            raise ValueError("a choice is neither text nor null")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("algorithms of GEMMs are chosen anew: cannot read %s (%s)", path, error)
        return {}


def _write(path: Path, machine: str, choices: Choices) -> None:
    try:
        tables = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        tables = {}
    tables[machine] = dict(sorted(choices.items()))
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(tables, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        logger.warning("algorithms of GEMMs will be chosen anew at the next start: cannot write %s (%s)", path, error)
