# SPDX-License-Identifier: Apache-2.0
"""The forms in which `LLM` takes prompts: vLLM's texts, token ids and dictionaries."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, cast

import numpy as np
import numpy.typing as npt

from blink.errors import BadRequestError
from blink.lora_request import LoRARequest, read_loras


class _Salted(TypedDict, total=False):
    """The salt keeps a prompt's blocks in the prefix cache apart."""

    cache_salt: str


class TextPrompt(_Salted):
    """A prompt as text."""

    prompt: str


class _Shown(_Salted, total=False):
    """The text is what outputs show."""

    prompt: str


class TokensPrompt(_Shown):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MULTIMODAL = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as the caller gave it."""

    prompt: str | list[int] | npt.NDArray[np.int32]  # an array's ids are checked
    cache_salt: str | None = None
    text: str | None = None  # that outputs show, where the prompt is token ids
    lora_request: LoRARequest | None = None


def with_loras(sources: Sequence[Source], given: object) -> list[Source]:
    """Return the prompts of a call with their LoRARequests, as read_loras() takes them.

    Raises:
        BadRequestError: they are none.
    """
    requests = read_loras(given, len(sources))
    return [replace(source, lora_request=one) for source, one in zip(sources, requests, strict=True)]


def as_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """Return the prompts of a call that may give one by itself."""
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))
    return cast("Sequence[PromptType]", [prompts] if is_one else prompts)


def source_of(prompt: PromptType) -> Source:
    """Check the form of a prompt.

    Raises:
        BadRequestError: it is none of those that a prompt may have.
    """
    salt = text = None
    if isinstance(prompt, Mapping):
        fields = {name: value for name, value in prompt.items() if value or name not in _MULTIMODAL}
        if unknown := fields.keys() - {*_KEYS}:
            raise BadRequestError(f"A prompt has no {min(unknown)!r}.", "prompt")
        salt, text = fields.get("cache_salt"), fields.get("prompt")
        tokens = fields.get("prompt_token_ids")
        if text is None and tokens is None:
            raise BadRequestError("A prompt has 'prompt' or 'prompt_token_ids'.", "prompt")
        if not isinstance(salt, str | None) or not isinstance(text, str | None):
            raise BadRequestError("A prompt's 'prompt' and 'cache_salt' are texts.", "prompt")
        if isinstance(tokens, str):
            raise BadRequestError("A prompt's 'prompt_token_ids' are a list of token ids.", "prompt")
        prompt = cast("str | Sequence[int]", text if tokens is None else tokens)
    if isinstance(prompt, str):
        return Source(prompt, salt)
    try:
        return Source(list(map(operator.index, prompt)), salt, text)
    except TypeError as error:
        raise BadRequestError("A prompt is a text or a list of token ids.", "prompt") from error
