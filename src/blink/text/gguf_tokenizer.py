# SPDX-License-Identifier: Apache-2.0
"""Build a tokenizer from GGUF metadata: byte-level BPE or SentencePiece. Refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from blink.errors import ConfigError
from blink.fields import Fields, show
from blink.text.gguf_sentencepiece import build_sentencepiece

_CONTROL = 3
_USER_DEFINED = 4

_LETTERS_THEN_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
    r"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}*{_O200K_LOWER}+{_O200K_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}+{_O200K_LOWER}*{_O200K_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How a family of tokenizers cuts text before BPE, by one pattern after the other; without one as GPT-2's."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_CL100K = _Split((_LETTERS_THEN_DIGITS.format(letters=r"\p{L}", digits=r"\p{N}{1,3}"),))
_LLAMA3 = replace(_CL100K, ignore_merges=True, add_bos=True)
_QWEN2 = _Split((_LETTERS_THEN_DIGITS.format(letters=r"\p{L}", digits=r"\p{N}"),), nfc=True)
_QWEN35 = _Split((_LETTERS_THEN_DIGITS.format(letters=r"\p{L}\p{M}", digits=r"\p{N}"),), nfc=True)
# Digits, then Chinese and Japanese, then the rest.
_DEEPSEEK = _Split(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

# The names are those that GGUF files carry in tokenizer.ggml.pre.
_SPLITS: dict[str, _Split] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "deepseek-v3": _DEEPSEEK,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _Split((_O200K,)),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that `tokenizer.ggml.*` describes.

    Raises:
        ConfigError: the kind of tokenizer or its pre-tokenizer is unknown, or a part is malformed.
    """
    fields = Fields(metadata, "The GGUF file's metadata", "tokenizer.ggml.")
    kind, tokens, kinds = fields.text("model", ""), fields.texts("tokens"), fields.integers("token_type", [])
    if kind == "llama":
        tokenizer, has_bos = build_sentencepiece(fields, tokens, kinds), True
    elif kind == "gpt2":
        tokenizer, has_bos = _build_byte_level(fields, tokens)
    else:
        raise ConfigError(f"GGUF tokenizers of type {show(kind)} are not supported; give --tokenizer a directory.")
    _add_special_tokens(tokenizer, tokens, kinds)
    if fields.flag("add_bos_token", has_bos):
        _prepend_bos(tokenizer, tokens, fields)
    return tokenizer


def _build_byte_level(fields: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer without its special tokens, and whether its family begins texts with BOS."""
    name = fields.text("pre", "gpt-2")
    split = _SPLITS.get(name)
    if split is None:
        raise ConfigError(f"The GGUF pre-tokenizer {show(name)} is unknown; give --tokenizer a directory.")
    tokenizer = Tokenizer(_bpe(tokens, fields.texts("merges"), split))
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, split.add_bos


def _bpe(tokens: list[str], lines: list[str], split: _Split) -> models.BPE:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for line in lines:
        left, space, right = line.partition(" ")
        # What the library finds wrong here it answers with a panic or a bare Exception.
        if not space or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ConfigError(f"The GGUF file merges {show(line)}, which are no tokens; give --tokenizer a directory.")
        merges.append((left, right))
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges)


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    if split.single_digits:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == _USER_DEFINED])


def _prepend_bos(tokenizer: Tokenizer, tokens: list[str], fields: Fields) -> None:
    if not fields.has("bos_token_id"):
        raise ConfigError("The GGUF file asks for a BOS token but names none; give --tokenizer a directory.")
    bos_id = fields.integer("bos_token_id", low=0, high=len(tokens) - 1)
    # This replaces ByteLevel's post-processor, which only trims offsets: nobody asks for offsets here.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["BOS", "$A"], special_tokens=[{"id": "BOS", "ids": [bos_id], "tokens": [tokens[bos_id]]}]
    )
