# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back. Loads neither torch nor transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from blink.errors import BadRequestError, ConfigError
from blink.fields import one_line
from blink.models.weights.text_files import read_file
from blink.text.detokenizer import (
    MAX_UNFINISHED,
    MAX_WINDOW,
    ByteLevelDetokenizer,
    Detokenizer,
    MarkingDetokenizer,
    StreamDetokenizer,
    TokenBytes,
    Tokens,
    TokenTexts,
    find_unfinished,
)
from blink.text.tokenizer_files import NamedTokens, add_named_tokens, read_named_tokens
from blink.text.tokenizer_probe import check_tokenizer

# One text at a time: a pool of threads would only be a detour.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The largest vocabularies of today take 35 MiB.
_MAX_TOKENIZER_BYTES = 128 << 20
_SPACE_MARK = "\u2581"  # a space, in vocabularies of SentencePiece
# Stands inside of what is no special token though its letters are those of one: no text of a client's may hold it.
_LETTERS_MARK = "\udc80"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer of the tokenizers library with what serving needs beside it. Safe to encode from several threads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        added = backend.get_added_tokens_decoder()
        self.special_tokens = frozenset(token for token, entry in added.items() if entry.special)
        self._added = frozenset(added)
        self._texts = TokenTexts(TokenBytes(backend, frozenset()))
        self._texts_without_special = TokenTexts(TokenBytes(backend, self.special_tokens))

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return self._backend.get_vocab_size()

    @property
    def end_id(self) -> int:
        """Return one more than the largest id: ids may have gaps."""
        return 1 + max(self._backend.get_vocab().values(), default=-1)

    @cached_property
    def max_token_chars(self) -> int:
        """Return an upper bound of the characters of input that one token can stand for."""
        # Unicode's composition shrinks text to a third at most.
        shrink = 3 if self._backend.normalizer is not None else 1
        return shrink * max((len(token) for token in self._backend.get_vocab()), default=1)

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        names = sorted(filter(None, map(self.token_name, self.special_tokens)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def spell(self, text: str) -> str:
        """Return a text for encode() in which the names of special tokens are letters like others.

        Raises:
            BadRequestError: the text holds lone surrogates, which no UTF-8 text can.
        """
        _check_unicode(text)
        return self._special_names.sub(lambda name: name[0][:1] + _LETTERS_MARK + name[0][1:], text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, parts of which may come from spell().

        Raises:
            BadRequestError: the text holds lone surrogates, which no UTF-8 text can, or the tokenizer fails.
        """
        if not text.isascii():
            if _LETTERS_MARK in text:
                first, *others = text.split(_LETTERS_MARK)
                found = self.encode(first, add_special_tokens=add_special_tokens)
                return found + [token for each in others for token in self.encode(each, add_special_tokens=False)]
            _check_unicode(text)
        try:
            # The same ids as by encode(), which also finds their places in the text: more than half of its work.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BadRequestError("The model's tokenizer cannot tokenize this text.", "prompt") from error

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids; unknown ids are left out."""
        return self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def open_detokenizer(
        self, *, skip_special_tokens: bool, marks: Mapping[str, str] | None = None, before: Tokens = ()
    ) -> Detokenizer:
        """Return a fresh decoder for one sequence.

        Args:
            skip_special_tokens: leave special tokens out.
            marks: by tokens' names, what these tokens are shown as.
            before: the tokens of the prompt: a text's first word has its space only behind others.
        """
        if marks:
            ids = {token: mark for name, mark in marks.items() if (token := self.token_id(name)) is not None}
            open_inner = partial(self._open_unmarked, skip_special_tokens)
            return MarkingDetokenizer(ids, open_inner, before)
        return self._open_unmarked(skip_special_tokens, before)

    def _open_unmarked(self, skip_special_tokens: bool, before: Tokens) -> Detokenizer:
        unfinished = self._find_unfinished(before)
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._texts_without_special if skip_special_tokens else self._texts, unfinished)
        skipped = self.special_tokens if skip_special_tokens else ()
        shown = (int(token) for token in reversed(before) if token not in skipped)
        last = list(islice(shown, MAX_WINDOW))[::-1]
        return StreamDetokenizer(self._backend, skip_special_tokens, last, len(unfinished))

    def _find_unfinished(self, before: Tokens) -> bytes:
        """Return the beginning of a character that tokens end with; nearly always their last one tells that none is."""
        last = self.token_bytes(int(before[-1])) if len(before) else b""
        if last and last[-1] < 0x80:
            return b""
        return find_unfinished(b"".join([self.token_bytes(int(token)) for token in before[-MAX_UNFINISHED:]]))

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its vocabulary entry."""
        return self._backend.token_to_id(text)

    def token_name(self, token: int) -> str:
        """Return the vocabulary entry of a token; empty for an unknown id."""
        return self._backend.id_to_token(token) or ""

    def token_text(self, token: int) -> str:
        """Return the text that a token is inside of a text, with U+FFFD for parts of characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for anywhere in a text; none for an unknown id."""
        if self._is_byte_level or token in self._added:
            return self._texts.token_bytes[token]
        name = self.token_name(token)
        if _BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        return name.replace(_SPACE_MARK, " ").encode()


def _check_unicode(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"The prompt is not valid Unicode: {error.reason}.", "prompt") from error


def without_marks(text: str) -> str:
    """Return a text parts of which came from Tokenizer.spell() as it was."""
    return text.replace(_LETTERS_MARK, "")


class NoTokenizer(Tokenizer):
    """Stands in where a model has no tokenizer: prompts must be token ids, and output has no text."""

    def __init__(self) -> None:
        backend = Backend(models.BPE())
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Refuse a text.

        Raises:
            BadRequestError: always.
        """
        del text, add_special_tokens
        raise BadRequestError("This server has no tokenizer (--skip-tokenizer-init): send token ids.", "prompt")

    def _find_unfinished(self, before: Tokens) -> bytes:
        """Return nothing: no token has a text."""
        del before
        return b""


def load_tokenizer(path: Path, named: NamedTokens | None = None) -> Tokenizer:
    """Load the tokenizer.json of a model directory, and the tokens that the files beside it name.

    Raises:
        ConfigError: there is none, or it is broken.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{path} holds no tokenizer.json; name a directory that does with --tokenizer,"
            " or take token ids only with --skip-tokenizer-init."
        )
    data = read_file(file, _MAX_TOKENIZER_BYTES)
    load = partial(_build, data, named or read_named_tokens(path))
    check_tokenizer(load, len(data), file)
    try:
        return Tokenizer(load())
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise ConfigError(f"{file} is not a readable tokenizer: {one_line(error)}") from error


def _build(data: bytes, named: NamedTokens) -> Backend:
    backend = Backend.from_buffer(data)
    add_named_tokens(backend, named)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _is_failure(error: BaseException) -> bool:
    """Say whether the library failed: it raises bare Exception, and of some inputs it panics, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
