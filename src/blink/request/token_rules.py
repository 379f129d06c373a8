# SPDX-License-Identifier: Apache-2.0
"""allowed_token_ids and bad_words, as what the sampler has: biases, and an automaton for words of several tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from blink.errors import BadRequestError
from blink.link.client import RegionInfo
from blink.sampling_params import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from blink.text.tokenizer import Tokenizer

# How far apart two logits may be, and two draws of the noise that a token is chosen by (csrc/sampler/draw.h).
_LOGITS, _NOISE = 200.0, 27.0
_MAX_WORD_BYTES = 512  # of all words of several tokens: each byte is a state of the automaton


def apply_token_rules(params: SamplingParams, tokenizer: Tokenizer, engine: RegionInfo) -> SamplingParams:
    """Return parameters that keep to their own allowed_token_ids and bad_words.

    Raises:
        BadRequestError: they are more than the engine can keep to; `param` names the field.
    """
    if params.bad_words:
        params = _without_words(params, params.bad_words, tokenizer)
    if params.allowed_token_ids is not None:
        params = _with_tokens(params, set(params.allowed_token_ids), engine.vocab_size)
    return params


def _without_words(params: SamplingParams, words: Iterable[str], tokenizer: Tokenizer) -> SamplingParams:
    """Bias single tokens away; keep the text free of words that some spelling has several tokens for."""
    tokens: set[int] = set()
    excluded: list[str] = []
    for word in dict.fromkeys(words):
        spellings = _spellings(word, tokenizer)
        if all(len(spelling) == 1 for spelling in spellings):
            tokens.update(spelling[0] for spelling in spellings)
        else:
            excluded.append(word.lstrip() or word)
    if excluded:
        params = replace(params, structured_outputs=_exclude(params, excluded))
    return _add_biases(params, tokens, -MAX_LOGIT_BIAS, "bad_words")


def _spellings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return a word's tokens at the beginning of a text and, where they are as many and others, behind a space."""
    bare = word.lstrip() or word
    first, spaced = (tokenizer.encode(prefix + bare, add_special_tokens=False) for prefix in ("", " "))
    return [first, spaced] if len(spaced) == len(first) and spaced[0] != first[0] else [first]


def _exclude(params: SamplingParams, words: list[str]) -> StructuredOutputsParams:
    if params.structured_outputs is not None:
        raise BadRequestError(
            f"bad_words: {words[0]!r} has several tokens, and such words cannot be combined with another form of the"
            " output.",
            "bad_words",
        )
    if sum(len(word.encode("utf-8", "replace")) for word in words) > _MAX_WORD_BYTES:
        raise BadRequestError(f"bad_words of several tokens must be at most {_MAX_WORD_BYTES} bytes.", "bad_words")
    return StructuredOutputsParams(excluded_words=tuple(words))


def _with_tokens(params: SamplingParams, allowed: set[int], vocab_size: int) -> SamplingParams:
    """Bias all other tokens away if they are few, else the allowed ones above all others."""
    room = (MAX_LOGIT_BIASES - len(params.biases)) // _copies(params)
    if vocab_size - len(allowed) <= room:
        return _add_biases(params, set(range(vocab_size)) - allowed, -MAX_LOGIT_BIAS, "allowed_token_ids")
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        raise BadRequestError("allowed_token_ids cannot be combined with penalties.", "allowed_token_ids")
    if params.structured_outputs is not None:
        told = "allowed_token_ids cannot be combined with another form of the output, nor with bad_words of several"
        raise BadRequestError(f"{told} tokens.", "allowed_token_ids")
    return _add_biases(params, allowed, MAX_LOGIT_BIAS, "allowed_token_ids")


def _copies(params: SamplingParams) -> int:
    """Return how often a bias must be added until no noise and no penalty outweighs it."""
    needed = _LOGITS + _NOISE * max(params.temperature, 1.0)
    return math.ceil(needed / (MAX_LOGIT_BIAS * min(params.repetition_penalty, 1.0)))


def _add_biases(params: SamplingParams, tokens: set[int], bias: float, param: str) -> SamplingParams:
    copies = _copies(params)
    room = (MAX_LOGIT_BIASES - len(params.biases)) // copies
    if len(tokens) > room:
        raise BadRequestError(
            f"{param} come to {len(tokens)} tokens; with this temperature and logit_bias they may be {room}.", param
        )
    added = [(token, float(bias)) for token in sorted(tokens) for _ in range(copies)]
    return replace(params, token_biases=[*params.token_biases, *added])
