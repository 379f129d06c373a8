# SPDX-License-Identifier: Apache-2.0
"""The bytes of all tokens of a vocabulary, which the engine needs to keep texts to a form. Loads no tokenizer."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blink.region.constants import CONSTANTS

if TYPE_CHECKING:
    from blink.text.tokenizer import Tokenizer

# No text holds this byte, so no automaton takes a special token but where it names one.
_WINDOW = 8  # bytes that are read at once: the text is filled up to them
_HEAD = struct.Struct("<Q")  # how many starts there are
_SPECIAL_MARK = bytes([CONSTANTS["special_token_byte"]])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token t has text[starts[t]:starts[t + 1]]; nothing if the tokenizer does not know it."""

    starts: npt.NDArray[np.uint32]  # [vocab_size + 1]
    text: npt.NDArray[np.uint8]

    def pack(self) -> bytes:
        """Return it as bytes, for another process of this machine."""
        return _HEAD.pack(len(self.starts)) + self.starts.tobytes() + self.text.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Vocabulary:
        """Return what pack() has returned."""
        own = bytearray(data)  # which may be written to
        starts = np.frombuffer(own, np.uint32, _HEAD.unpack_from(own)[0], _HEAD.size)
        return cls(starts, np.frombuffer(own, np.uint8, offset=_HEAD.size + starts.nbytes))

    def resize(self, vocab_size: int) -> Vocabulary:
        """Return as many tokens: the first ones, or others behind them that have no bytes."""
        starts = self.starts[: vocab_size + 1]
        starts = np.pad(starts, (0, vocab_size + 1 - len(starts)), mode="edge")
        return Vocabulary(starts, _fill_window(self.text[: starts[-1]].tobytes()))


def list_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """Return the bytes of a model's tokens."""
    texts = [_token_bytes(tokenizer, token) for token in range(vocab_size)]
    starts = np.fromiter(accumulate(map(len, texts), initial=0), np.uint32, vocab_size + 1)
    return Vocabulary(starts, _fill_window(b"".join(texts)))


def _fill_window(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(bytearray(text.ljust(-(-len(text) // _WINDOW) * _WINDOW, b"\0")), np.uint8)


def _token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    if token in tokenizer.special_tokens:
        return _SPECIAL_MARK + tokenizer.token_name(token).encode()
    data = tokenizer.token_bytes(token)
    return b"" if _SPECIAL_MARK in data else data  # the mark alone would pass for the beginning of a special token
