# SPDX-License-Identifier: Apache-2.0
"""From a request's text or token ids to the checked, hashed prompt that the engine takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from blink.errors import BadRequestError, PromptTooLongError
from blink.link.queue_pair import KvOrigin
from blink.link.variant import BASE_MODEL, ModelVariant
from blink.region.block_hashes import hash_blocks, hash_root
from blink.text.tokenizer import Tokenizer

# About a millisecond of work: more would delay the tokens of other streams, so it goes to a thread.
_INLINE_CHARS = 4096
_INLINE_TOKENS = 8192
# Tokenizing takes some sixty bytes for each character: what no context is filled with is not tried.
_MAX_CHARS = 1 << 20
_MAX_CHARS_PER_TOKEN = 16

Source = str | list[int] | npt.NDArray[np.int32]  # a prompt as text, as unchecked token ids or as checked ones


class Limits(Protocol):
    """What the engine says about prompts (a part of the client's RegionInfo)."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def longest_prompt(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def hash_key(self) -> bytes: ...
    @property
    def prefix_caching(self) -> bool: ...


class PromptRules(NamedTuple):
    """How a request wants its prompts treated."""

    add_special_tokens: bool
    truncate: int | None = None  # tokens to keep; -1: as many as fit
    truncate_right: bool = False
    cache_salt: str | None = None
    param: str = "prompt"  # the field that the prompts come from
    prediction: str = ""  # what the answers may have much of, for speculative decoding
    variant: ModelVariant = BASE_MODEL  # whose blocks have other hashes, by its content


class Prompt(NamedTuple):
    """One prompt as the engine takes it."""

    tokens: npt.NDArray[np.int32]
    block_hashes: bytes
    origin: KvOrigin

    @property
    def num_tokens(self) -> int:
        """Return the length in tokens."""
        return len(self.tokens)


async def prepare_prompts(
    sources: Sequence[Source], rules: PromptRules, tokenizer: Tokenizer, limits: Limits, token_limit: int | None
) -> list[Prompt]:
    """Tokenize, truncate, check and hash the prompts of one request; long ones in a thread.

    token_limit: new tokens that must fit behind each prompt.

    Raises:
        BadRequestError: a prompt is empty, too long or holds unknown token ids.
    """

    weight = sum(len(source) for source in sources)
    if weight <= (_INLINE_CHARS if sources and isinstance(sources[0], str) else _INLINE_TOKENS):
        return prepare_prompts_now(sources, rules, tokenizer, limits, token_limit)
    return await asyncio.to_thread(prepare_prompts_now, sources, rules, tokenizer, limits, token_limit)


def prepare_prompts_now(
    sources: Sequence[Source], rules: PromptRules, tokenizer: Tokenizer, limits: Limits, token_limit: int | None
) -> list[Prompt]:
    """Do what prepare_prompts() does in the calling thread.

    Raises:
        BadRequestError: a prompt is empty, too long or holds unknown token ids.
    """
    if not sources:
        raise BadRequestError("prompt must not be an empty list.", "prompt")
    return [_prepare(source, rules, tokenizer, limits, token_limit) for source in sources]


def _prepare(
    source: Source, rules: PromptRules, tokenizer: Tokenizer, limits: Limits, token_limit: int | None
) -> Prompt:
    tokens = source if isinstance(source, np.ndarray) else read_tokens(source, rules, tokenizer, limits)
    if rules.truncate is not None:
        tokens = _truncate(tokens, rules.truncate, rules, limits, token_limit)
    if not len(tokens):
        raise BadRequestError("The prompt cannot be empty.", rules.param)
    _check_length(len(tokens), rules, limits, token_limit)
    content, salt = rules.variant.content, rules.cache_salt or ""
    root = hash_root(limits.hash_key, (f"{content}:{salt}" if content else salt).encode())
    hashes = hash_blocks(tokens, limits.block_size, limits.hash_key, root) if limits.prefix_caching else b""
    return Prompt(tokens, hashes, KvOrigin(root, rules.variant))


def read_tokens(
    source: str | list[int], rules: PromptRules, tokenizer: Tokenizer, limits: Limits
) -> npt.NDArray[np.int32]:
    """Return the tokens of a text, or checked token ids.

    Raises:
        BadRequestError: the text is too long, or a token is none of the model's.
    """
    if isinstance(source, list):
        return _checked_ids(source, limits.vocab_size, rules.param)
    _check_text_length(source, rules, tokenizer, limits)
    tokens = np.array(tokenizer.encode(source, add_special_tokens=rules.add_special_tokens), np.int32)
    # A tokenizer may have more tokens than its model: a borrowed one, or one with tokens added.
    unknown = tokens[tokens >= limits.vocab_size]
    if len(unknown):
        name = tokenizer.token_name(int(unknown[0]))
        raise BadRequestError(f"{name!r} is token {unknown[0]}, which is out of the model's vocabulary.", rules.param)
    return tokens


def _checked_ids(source: list[int], vocab_size: int, param: str) -> npt.NDArray[np.int32]:
    try:
        tokens = np.fromiter(source, np.uint32, len(source))
    except OverflowError:  # a negative one
        tokens = None
    if tokens is None or (source and max(source) >= vocab_size):
        check_vocabulary(source, vocab_size, param)
    assert tokens is not None
    return tokens.view(np.int32)


def _check_text_length(text: str, rules: PromptRules, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuse a text before the work of tokenizing it, if it cannot fit or is longer than any that is served."""
    if rules.truncate is None and len(text) > limits.max_model_len * tokenizer.max_token_chars:
        raise _too_long(f"more than {limits.max_model_len}", rules, limits)
    longest = max(_MAX_CHARS, _MAX_CHARS_PER_TOKEN * limits.max_model_len)
    if len(text) > longest:
        told = f"The prompt has {len(text)} characters; this server takes at most {longest}."
        raise BadRequestError(told, rules.param)


def check_vocabulary(tokens: list[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse what is no token id of the model.

    Raises:
        BadRequestError: it names one.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = max(tokens) if max(tokens) >= vocab_size else min(tokens)
        raise BadRequestError(f"Token id {wrong} is out of vocabulary.", param)


def _truncate(
    tokens: npt.NDArray[np.int32], wanted: int, rules: PromptRules, limits: Limits, token_limit: int | None
) -> npt.NDArray[np.int32]:
    room = max(1, limits.longest_prompt + 1 - (token_limit or 1))
    keep = room if wanted == -1 else wanted
    if keep > limits.max_model_len:
        raise BadRequestError(
            f"truncate_prompt_tokens value ({keep}) is greater than max_model_len ({limits.max_model_len}).",
            "truncate_prompt_tokens",
        )
    if len(tokens) <= keep:
        return tokens
    return tokens[:keep] if rules.truncate_right else tokens[len(tokens) - keep :]


def _check_length(num_tokens: int, rules: PromptRules, limits: Limits, token_limit: int | None) -> None:
    longest = limits.longest_prompt
    if num_tokens > longest:
        raise _too_long(str(num_tokens), rules, limits)
    if token_limit is not None and num_tokens + token_limit > longest + 1:
        room = f"{token_limit} > {limits.max_model_len} - {num_tokens}"
        error = PromptTooLongError(
            f"'max_tokens' or 'max_completion_tokens' is too large: {token_limit}. This model's maximum context length"
            f" is {limits.max_model_len} tokens and your request has {num_tokens} input tokens ({room}).",
            "max_tokens",
        )
        raise error.measured(str(num_tokens), token_limit, limits.max_model_len)


def _too_long(num_tokens: str, rules: PromptRules, limits: Limits) -> BadRequestError:
    error = PromptTooLongError(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your request has {num_tokens}"
        " input tokens. Please reduce the length of the input messages.",
        rules.param,
    )
    return error.measured(num_tokens, 0, limits.max_model_len)
