# SPDX-License-Identifier: Apache-2.0
"""Prompts that ask a model for what is missing between two texts, by the tokens that it was trained on for that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blink.errors import BadRequestError
from blink.text.prompt import Limits, PromptRules, read_tokens
from blink.text.tokenizer import Tokenizer

# What stands before the text, before the suffix and behind it, by the families of models.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek coder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)


def fill_in(
    prompt: str | list[int], suffix: str, rules: PromptRules, tokenizer: Tokenizer, limits: Limits
) -> npt.NDArray[np.int32]:
    """Return the tokens of the prompt for what stands between a prompt and a suffix.

    Raises:
        BadRequestError: the model has no tokens for that.
    """
    found = find_marks(tokenizer)
    if found is None:
        told = "suffix needs a model with fill-in tokens, such as <|fim_prefix|>: this one has none."
        raise BadRequestError(told, "suffix")
    start = tokenizer.encode("", add_special_tokens=rules.add_special_tokens)
    bare = rules._replace(add_special_tokens=False)
    parts = [read_tokens(text, bare, tokenizer, limits) for text in (prompt, suffix)]
    before, between, behind = ([token] for token in found)
    return np.concatenate([start, before, parts[0], between, parts[1], behind]).astype(np.int32)


def find_marks(tokenizer: Tokenizer) -> list[int] | None:
    """Return the tokens before the text, before the suffix and behind it; None if the model has none."""
    for marks in _MARKS:
        found = [token for mark in marks if (token := tokenizer.token_id(mark)) is not None]
        if len(found) == len(marks):
            return found
    return None
