# SPDX-License-Identifier: Apache-2.0
"""Try a tokenizer.json out before it is trusted: in a child process, with limits of memory and of time.

Such a file is a program, of patterns and replacements that comes with the model. The child loads it and tokenizes texts
made of the letters that its own parts name, which is where texts grow, and where patterns take time without an end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend

from blink.errors import ConfigError

_LOADING_BYTES = 384 << 20  # a vocabulary of 200,000 takes some 200 MiB
_LOADING_SECONDS = 0.6  # of the processor, and
_LOADING_SECONDS_PER_BYTE = 0.25 / (1 << 20)
_PROBE_BYTES = 128 << 20
_PROBE_SECONDS = 0.8  # for all texts; most tokenizers take some hundredths
_PATIENCE = 120.0  # for a child that waits for a core
_MAX_SPECIAL_TOKENS = 64  # around a text
_MAX_PART = 64 << 10  # letters of a replacement or a pattern
_MAX_GROWTH = 32  # tokens of a byte, or letters of one when read back; a ligature becomes 18 letters
_MAX_OFFSET = 256
_LETTERS = "aA1 .\n\u044f\u4e2d\u00e9\u0627\U0001f600"
_MAX_LETTERS = 64
_MAX_WORDS = 32
_WORD = re.compile(r"[^\W_]{2,16}")
_CHARSMAP = "precompiled_charsmap"  # a table, of any length


def check_tokenizer(load: Callable[[], Backend], num_bytes: int, path: Path) -> None:
    """Refuse a tokenizer.json of so many bytes whose work has no end or makes far more than it is given.

    What `load` cannot load at all is not refused here.

    Raises:
        ConfigError: as above.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # The child takes no lock that another thread may hold: it calls the library and ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(read_end)
        _run_child(load, num_bytes, write_end)
    os.close(write_end)
    try:
        fault = _await_report(read_end, child)
    finally:
        os.close(read_end)
    if fault:
        raise ConfigError(f"{path} is not used: {fault}.")


def _await_report(read_end: int, child: int) -> str:
    """Return what a child reports, or how it died."""
    deadline, report = time.monotonic() + _PATIENCE, b""
    while select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(read_end, 4096)
        if not part:
            break
        report += part
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        return report.decode(errors="replace")
    too_slow = os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL)
    return f"loading it and tokenizing short texts takes too much {'time' if too_slow else 'memory'}"


def _run_child(load: Callable[[], Backend], num_bytes: int, write_end: int) -> NoReturn:
    try:
        # The library tells of panics and of a lack of memory there, by an abort, of which nobody else is to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no thread has come along
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        _limit(_LOADING_BYTES, _LOADING_SECONDS + _LOADING_SECONDS_PER_BYTE * num_bytes)
        try:
            backend = load()
        except BaseException:  # who loads it says why
            os._exit(0)
        _limit(_PROBE_BYTES, _PROBE_SECONDS)
        os.write(write_end, _find_fault(backend).encode())
    except MemoryError:
        os.abort()
    except BaseException as error:
        os.write(write_end, f"it fails of short texts ({type(error).__name__})".encode())
    os._exit(0)


def _limit(num_bytes: int, seconds: float) -> None:
    """Let this process take so many bytes more, and so many seconds of the processor."""
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _find_fault(backend: Backend) -> str:
    """Say what makes a tokenizer useless; nothing where nothing does."""
    if max(map(backend.num_special_tokens_to_add, (False, True))) > _MAX_SPECIAL_TOKENS:
        return f"it puts more than {_MAX_SPECIAL_TOKENS} tokens around each text"
    backend.no_padding()
    backend.no_truncation()
    parts: Any = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    strings = {text for part in parts if part is not None for text in _strings(json.loads(part.__getstate__()))}
    if any(len(text) > _MAX_PART for text in strings):
        return f"one of its rules has more than {_MAX_PART} letters"
    for text in _make_texts(strings):
        length = len(text.encode())
        ids = backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
        grown = max(len(ids), len(backend.decode(ids, skip_special_tokens=False)))
        if grown > _MAX_GROWTH * length + _MAX_OFFSET:
            return f"it makes {grown} tokens or letters of a text of {length} bytes"
    return ""


def _strings(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for name, value in part.items():
            if name not in ("type", _CHARSMAP):
                yield from _strings(value)
    elif isinstance(part, list):
        for value in part:
            yield from _strings(value)


def _make_texts(strings: set[str]) -> Iterator[str]:
    """Return texts that repeat the letters and the words of rules; most end in a way that the rule may not expect."""
    ordered = sorted(strings)
    yield ""
    letters = dict.fromkeys(_LETTERS + "".join(text[:_MAX_OFFSET] for text in ordered))
    words = dict.fromkeys(word for text in ordered for word in _WORD.findall(text[:_MAX_OFFSET]))
    units = [*list(letters)[:_MAX_LETTERS], *list(words)[:_MAX_WORDS], *(text for text in ordered if len(text) <= 64)]
    end = "!" + "".join(list(letters)[:_MAX_LETTERS])  # a pattern may be tried only where all of its letters are
    for unit in units[: 2 * _MAX_LETTERS]:
        yield unit * 32 + end
    for unit in units[: 2 * _MAX_LETTERS]:
        yield f"{unit} " * 8 + unit * (_MAX_OFFSET // max(1, len(unit))) + "\x00"
