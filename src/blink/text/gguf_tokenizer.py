# SPDX-License-Identifier: Apache-2.0
"""Build a byte-level BPE tokenizer from GGUF metadata. Refuses what it does not know instead of guessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from blink.errors import ConfigError

_CONTROL = 3
_USER_DEFINED = 4

_LETTERS_THEN_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    """How a family of tokenizers cuts text before BPE; an empty pattern is GPT-2's."""

    pattern: str = ""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_LLAMA3 = _Split(_LETTERS_THEN_DIGITS.format(digits=r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_CL100K = _Split(_LETTERS_THEN_DIGITS.format(digits=r"\p{N}{1,3}"))
_QWEN2 = _Split(_LETTERS_THEN_DIGITS.format(digits=r"\p{N}"), nfc=True)

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
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _Split(_O200K),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that `tokenizer.ggml.*` describes.

    Raises:
        ConfigError: the kind of tokenizer is not byte-level BPE, or its pre-tokenizer is unknown.
    """
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ConfigError(f"GGUF tokenizers of type {kind!r} are not supported; give --tokenizer a directory.")
    split = _SPLITS.get(name)
    if split is None:
        raise ConfigError(f"The GGUF pre-tokenizer {name!r} is unknown; give --tokenizer a directory.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    if metadata.get("tokenizer.ggml.add_bos_token", split.add_bos):
        _prepend_bos(tokenizer, tokens, metadata)
    return tokenizer


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    if split.single_digits:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    elif split.pattern:
        steps = [pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")]
    else:
        steps = []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == _USER_DEFINED])


def _prepend_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is None:
        raise ConfigError("The GGUF file asks for a BOS token but names none; give --tokenizer a directory.")
    # This replaces ByteLevel's post-processor, which only trims offsets: nobody asks for offsets here.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["BOS", "$A"], special_tokens=[{"id": "BOS", "ids": [bos_id], "tokens": [tokens[bos_id]]}]
    )
