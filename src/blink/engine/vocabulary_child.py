# SPDX-License-Identifier: Apache-2.0
"""A child process that reads the bytes of a model's tokens while the engine loads torch and the weights.

The tokenizer and the memory that it takes are the child's alone, and go with it. The child is forked, which is safe
only before libraries with threads are loaded, as numpy and torch are.
"""

from __future__ import annotations

import os
import signal
import struct
from typing import TYPE_CHECKING, NoReturn

from blink.config import EngineConfig, ModelConfig
from blink.host.process import die_with_parent

if TYPE_CHECKING:
    from blink.text.vocabulary import Vocabulary

_HEAD = struct.Struct("<Q")  # how many starts there are: what the child writes first
_NICENESS = 10  # on two cores, the engine and a frontend have one each; the engine needs the tokens last
_MOST_TOKENS = 1 << 21  # tokenizers of today have a tenth; their ids may be any


class VocabularyChild:
    """The child, which ends with the engine. Where it fails, the engine reads the tokens itself, and says why not."""

    def __init__(self, config: ModelConfig) -> None:
        """Start it for a model whose files are on this machine."""
        self._file = os.memfd_create("vocabulary")
        parent = os.getpid()
        self._process = os.fork()
        if not self._process:
            _run_child(parent, config, self._file)

    def read(self, config: EngineConfig, vocab_size: int) -> Vocabulary:
        """Wait for the child; return the bytes of as many tokens, and none where the model has no tokenizer."""
        from blink.engine.vocabulary import read_vocabulary  # loads torch

        try:
            _, status = os.waitpid(self._process, 0)
            found = _read_file(self._file) if status == 0 else None
        finally:
            os.close(self._file)
        return read_vocabulary(config, vocab_size) if found is None else found.resize(vocab_size)


def _run_child(parent: int, config: ModelConfig, file: int) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        os.nice(_NICENESS)
        status = 0 if _write_file(config, file) else 1
    finally:
        os._exit(status)  # whatever was raised: the engine meets it again


def _write_file(config: ModelConfig, file: int) -> bool:
    from blink.text.model_vocabulary import read_whole_vocabulary

    vocabulary = read_whole_vocabulary(config, _MOST_TOKENS)
    if vocabulary is None:
        return False
    with open(file, "wb", closefd=False) as out:
        out.write(_HEAD.pack(len(vocabulary.starts)))
        out.write(vocabulary.starts.tobytes())
        out.write(vocabulary.text.tobytes())
    return True


def _read_file(file: int) -> Vocabulary:
    import numpy as np

    from blink.text.vocabulary import Vocabulary

    os.lseek(file, 0, os.SEEK_SET)
    with open(file, "rb", closefd=False) as data:
        (count,) = _HEAD.unpack(data.read(_HEAD.size))
        starts = np.frombuffer(bytearray(data.read(4 * count)), np.uint32)
        return Vocabulary(starts, np.frombuffer(bytearray(data.read()), np.uint8))
