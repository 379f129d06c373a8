# SPDX-License-Identifier: Apache-2.0
"""A child process that reads the bytes of a model's tokens while the engine loads torch and the weights.

The tokenizer and the memory that it takes are the child's alone, and go with it. The child is forked, which is safe
only before libraries with threads are loaded, as numpy and torch are.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import Any, NoReturn

from blink.config import ModelConfig
from blink.host.process import die_with_parent

_NICENESS = 10  # on two cores, the engine and a frontend have one each; the engine needs the tokens last
_MOST_TOKENS = 1 << 21  # tokenizers of today have a tenth; their ids may be any


class VocabularyChild:
    """The child, which ends with the engine. Where it fails, the engine reads the tokens itself, and says why not."""

    def __init__(self, config: ModelConfig) -> None:
        """Start it for a model whose files are on this machine."""
        self._file = os.memfd_create("vocabulary")
        parent = os.getpid()
        self.process = os.fork()
        if not self.process:
            _run_child(parent, config, self._file)

    def wait(self) -> bytes | None:
        """Return what it has read, as Vocabulary.pack() has it, once; None: it has failed."""
        try:
            _, status = os.waitpid(self.process, 0)
            return os.pread(self._file, os.fstat(self._file).st_size, 0) if status == 0 else None
        finally:
            os.close(self._file)


def load_reader() -> Any:
    """Load what reads a vocabulary, and the tokenizers' library, which an engine with a child does without."""
    return import_module("blink.text.model_vocabulary")


def _run_child(parent: int, config: ModelConfig, file: int) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        os.nice(_NICENESS)
        found = load_reader().read_whole_vocabulary(config, _MOST_TOKENS)
        if found is not None:
            with open(file, "wb", closefd=False) as out:
                out.write(found.pack())
            status = 0
    finally:
        os._exit(status)  # whatever was raised: the engine meets it again
