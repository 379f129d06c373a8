# SPDX-License-Identifier: Apache-2.0
"""The forms in which `LLM` takes prompts: vLLM's texts, token ids and dictionaries."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from blink.errors import BadRequestError


class PromptDict(TypedDict, total=False):
    """A prompt as text or as token ids; the salt keeps its blocks in the prefix cache apart."""

    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str


PromptType = str | Sequence[int] | PromptDict


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as the caller gave it."""

    prompt: str | list[int]
    cache_salt: str | None = None


def as_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """Return the prompts of a call that may give one by itself."""
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))
    return cast("Sequence[PromptType]", [prompts] if is_one else prompts)


def source_of(prompt: PromptType) -> Source:
    """Check the form of a prompt.

    Raises:
        BadRequestError: it is none of those that a prompt may have.
    """
    salt = None
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - set(PromptDict.__annotations__):
            raise BadRequestError(f"A prompt has no {sorted(unknown)[0]!r}.", "prompt")
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise BadRequestError("A prompt has either 'prompt' or 'prompt_token_ids'.", "prompt")
        salt = prompt.get("cache_salt")
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids", "")
    if isinstance(prompt, str):
        return Source(prompt, salt)
    try:
        return Source([operator.index(token) for token in prompt], salt)
    except TypeError as error:
        raise BadRequestError("A prompt is a text or a list of token ids.", "prompt") from error
