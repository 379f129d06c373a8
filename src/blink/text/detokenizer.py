# SPDX-License-Identifier: Apache-2.0
"""Turn token ids into text, one at a time, without ever splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend

Tokens = Sequence[int] | npt.NDArray[np.int32]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
MAX_UNFINISHED = 3  # a character has four bytes at most
_MIN_WINDOW, MAX_WINDOW = 4, 32  # tokens of the prompt that are decoded with the first of an answer


def _unicode_of_bytes() -> dict[int, str]:
    """Return GPT-2's alphabet: the printable character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(256 + rank) for rank, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = {character: byte for byte, character in _unicode_of_bytes().items()}


class Detokenizer(Protocol):
    """The text of one sequence as it grows."""

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty inside a character."""
        ...

    def finish(self) -> str:
        """Return what an unfinished character leaves behind."""
        ...


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, filled on demand; empty for skipped and unknown ids."""

    def __init__(self, backend: Backend, skip: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._skip = skip

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._skip else self._backend.id_to_token(token)
        data = b"" if text is None else _bytes_of(text)
        self[token] = data
        return data


class TokenTexts(dict[int, "str | None"]):
    """The text of each token that is whole characters by itself, None for the others; filled on demand."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__()
        self.token_bytes = token_bytes

    def __missing__(self, token: int) -> str | None:
        try:
            text = self.token_bytes[token].decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def find_unfinished(data: bytes) -> bytes:
    """Return the beginning of a character that bytes end with."""
    if not data or data[-1] < 0x80:  # as mostly: nothing, or a character of one byte
        return b""
    decoder = _Utf8Decoder("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


class ByteLevelDetokenizer:
    """Decode byte-level BPE through a table; the slow path runs only inside characters of several tokens."""

    __slots__ = ("_decoder", "_inside", "_stale", "_texts")

    def __init__(self, texts: TokenTexts, unfinished: bytes = b"") -> None:
        """Begin behind the beginning of a character, if `unfinished` is one."""
        self._texts = texts
        self._decoder = _Utf8Decoder("replace")
        self._decoder.decode(unfinished)
        self._inside = bool(unfinished)
        self._stale = _REPLACEMENT if unfinished else ""  # not this text's, should the character stay unfinished

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        if not self._inside:
            text = self._texts[token]
            if text is not None:
                return text
        text = self._decoder.decode(self._texts.token_bytes[token])
        self._inside = bool(self._decoder.getstate()[0])
        return self._drop_stale(text)

    def finish(self) -> str:
        """Return a replacement character for an unfinished character, else nothing."""
        self._inside = False
        return self._drop_stale(self._decoder.decode(b"", final=True))

    def _drop_stale(self, text: str) -> str:
        if text and self._stale:
            text, self._stale = text.removeprefix(self._stale), ""
        return text


class StreamDetokenizer:
    """Decode any other tokenizer: what a token adds to the text of the few tokens before it.

    The first tokens follow those of the prompt: decoders strip the space before a text, not one inside of it.
    NOTE: where a model emits bytes that are no UTF-8, the library's decoding of the whole replaces also the valid bytes
    before them; a stream has shown these already.
    """

    __slots__ = ("_decode", "_known", "_num_known", "_stale", "_window")

    def __init__(
        self, backend: Backend, skip_special_tokens: bool, before: Sequence[int] = (), num_unfinished: int = 0
    ) -> None:
        """Begin behind tokens that have a text; the last `num_unfinished` of them are the beginning of a character."""
        decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
        self._decode: Callable[[list[int]], str] = decode
        self._window = _find_window(decode, before)
        self._num_known = len(self._window) - num_unfinished  # tokens whose text has been told
        self._known = decode(self._window[: self._num_known])
        self._stale = _REPLACEMENT * num_unfinished  # not this text's, should the character stay unfinished

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._known:
            self._num_known = len(self._window)
        is_open = text.endswith(_REPLACEMENT) and len(self._window) - self._num_known <= MAX_UNFINISHED
        if is_open or len(text) <= len(self._known):
            return ""
        new = self._drop_stale(text[len(self._known) :])
        self._window = self._window[self._num_known :]
        self._num_known = len(self._window)
        self._known = self._decode(self._window)
        return new

    def finish(self) -> str:
        """Return what an unfinished character leaves behind."""
        return self._drop_stale(self._decode(self._window)[len(self._known) :])

    def _drop_stale(self, text: str) -> str:
        if text and self._stale:
            text, self._stale = text.removeprefix(self._stale), ""
        return text


def _find_window(decode: Callable[[list[int]], str], before: Sequence[int]) -> list[int]:
    """Return the last tokens, so many that they have a text and do not begin inside of a character."""
    for size in range(_MIN_WINDOW, len(before)):
        window = list(before[-size:])
        text = decode(window)
        if text and not text.startswith(_REPLACEMENT):
            return window
    return list(before)


class MarkingDetokenizer:
    """Show some tokens as marks of their own, between texts that other detokenizers make."""

    __slots__ = ("_inner", "_marks", "_open")

    def __init__(
        self, marks: Mapping[int, str], open_inner: Callable[[Tokens], Detokenizer], before: Tokens = ()
    ) -> None:
        """Begin behind the tokens `before`, which are given to the first of the other detokenizers."""
        self._marks = marks
        self._open = open_inner
        self._inner = open_inner(before)

    def push(self, token: int) -> str:
        """Return the text that this token completes; before a mark also what an unfinished character leaves behind."""
        mark = self._marks.get(token)
        if mark is None:
            return self._inner.push(token)
        rest, self._inner = self._inner.finish(), self._open(())
        return rest + mark

    def finish(self) -> str:
        """Return what an unfinished character leaves behind."""
        return self._inner.finish()
