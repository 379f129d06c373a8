# SPDX-License-Identifier: Apache-2.0
"""Turn token ids into text, one at a time, without ever splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


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


class ByteLevelDetokenizer:
    """Decode byte-level BPE through a table; the slow path runs only inside characters of several tokens."""

    __slots__ = ("_decoder", "_inside", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = _Utf8Decoder("replace")
        self._inside = False

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        if not self._inside:
            text = self._texts[token]
            if text is not None:
                return text
        text = self._decoder.decode(self._texts.token_bytes[token])
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return a replacement character for an unfinished character, else nothing."""
        self._inside = False
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """Decode any other tokenizer with the library's stream, which decodes a window of tokens each time.

    NOTE: where a model emits bytes that are no UTF-8, the library's decoding of the whole replaces also the valid bytes
    before them; a stream has shown these already.
    """

    __slots__ = ("_backend", "_length", "_skip_special", "_stream", "_tokens")

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._tokens: list[int] = []
        self._length = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        self._tokens.append(token)
        text = self._stream.step(self._backend, token) or ""
        self._length += len(text)
        return text

    def finish(self) -> str:
        """Return the rest of the whole text that the stream still holds."""
        whole = self._backend.decode(self._tokens, skip_special_tokens=self._skip_special)
        return whole[self._length :]


class MarkingDetokenizer:
    """Show some tokens as marks of their own, between texts that other detokenizers make."""

    __slots__ = ("_inner", "_marks", "_open")

    def __init__(self, marks: Mapping[int, str], open_inner: Callable[[], Detokenizer]) -> None:
        self._marks = marks
        self._open = open_inner
        self._inner = open_inner()

    def push(self, token: int) -> str:
        """Return the text that this token completes; before a mark also what an unfinished character leaves behind."""
        mark = self._marks.get(token)
        if mark is None:
            return self._inner.push(token)
        rest, self._inner = self._inner.finish(), self._open()
        return rest + mark

    def finish(self) -> str:
        """Return what an unfinished character leaves behind."""
        return self._inner.finish()
