# SPDX-License-Identifier: Apache-2.0
"""Build a SentencePiece tokenizer of the BPE kind (Llama 2, Mistral, Gemma, Phi-3) from GGUF metadata."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, normalizers

from blink.errors import ConfigError
from blink.models.fields import Fields

_SPACE = "\u2581"  # what SentencePiece writes for one
_NORMAL = 1
_MAX_TOKEN_CHARS = 256  # each is tried at every place where it can be cut in two


def build_sentencepiece(fields: Fields, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Build the tokenizer without its special tokens; fields: those of tokenizer.ggml.

    Raises:
        ConfigError: a part is missing or malformed.
    """
    scores = fields.numbers("scores", low=-1e300)
    if not len(scores) == len(kinds) == len(tokens):
        raise ConfigError("The GGUF file has not one score and one type for each token; give --tokenizer a directory.")
    if not fields.has("unknown_token_id"):
        raise ConfigError("The GGUF file names no token for what is unknown; give --tokenizer a directory.")
    unknown = tokens[fields.integer("unknown_token_id", low=0, high=len(tokens) - 1)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = [(token, score) for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == _NORMAL]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_list_merges(pieces, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = fields.flag("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _list_merges(pieces: list[tuple[str, float]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make another, the best token's first: SentencePiece merges by score."""
    ranked = sorted(pieces, key=lambda piece: -piece[1])
    return [pair for token, _ in ranked for pair in _cut(token, vocabulary)]


def _cut(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    if len(token) > _MAX_TOKEN_CHARS:
        return
    for place in range(1, len(token)):
        left, right = token[:place], token[place:]
        if left in vocabulary and right in vocabulary:
            yield left, right
