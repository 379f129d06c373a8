# SPDX-License-Identifier: Apache-2.0
"""Reads conversations from ShareGPT's JSON file: the first question is the prompt, the answer gives its length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from blink.bench.lengths import LONGEST_INPUT, LONGEST_TOTAL, SHORTEST, Lengths
from blink.bench.target import Target
from blink.errors import ConfigError

_BYTES_PER_TOKEN: Final = 4  # English text, where the server does not tokenize


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt, its tokens if known, and the lengths that it gives."""

    text: str
    tokens: list[int] | None
    lengths: Lengths


def read_conversations(
    path: str, number: int, max_model_len: int, target: Target, rng: np.random.Generator
) -> list[Conversation]:
    """Take conversations in random order; again when they run out.

    Those are left out that vLLM's benchmark leaves out by their length, and those that the model does not take.

    Raises:
        ConfigError: no such file, not of this form, or nothing in it fits.
    """
    turns = _read_first_turns(path)
    longest = min(LONGEST_TOTAL, max_model_len or LONGEST_TOTAL)
    found: list[Conversation] = []
    for index in rng.permutation(len(turns)):
        if len(found) == number:
            break
        prompt, answer = turns[index]
        conversation = _measure(prompt, answer, longest, target)
        if conversation is not None:
            found.append(conversation)
    if not found:
        raise ConfigError(f"--dataset-path {path}: no conversation has the length wanted")
    return [found[index % len(found)] for index in range(number)]


def _read_first_turns(path: str) -> list[tuple[str, str]]:
    if not path:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path")
    try:
        entries: list[dict[str, Any]] = json.loads(Path(path).read_bytes())
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in entries]
        return [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"--dataset-path {path} is not of ShareGPT's form: {error!r}") from error


def _measure(prompt: str, answer: str, longest: int, target: Target) -> Conversation | None:
    # No token is longer than some characters: what is far too long need not be tokenized.
    if len(prompt) > 16 * LONGEST_INPUT or len(answer) > 16 * LONGEST_TOTAL:
        return None
    tokens, answer_tokens = target.tokenize(prompt), target.tokenize(answer)
    lengths = Lengths(_count(prompt, tokens), _count(answer, answer_tokens))
    if min(lengths.input_len, lengths.output_len) < SHORTEST or lengths.input_len > LONGEST_INPUT:
        return None
    if lengths.input_len + lengths.output_len > longest:
        return None
    return Conversation(prompt, tokens, lengths)


def _count(text: str, tokens: list[int] | None) -> int:
    return len(text.encode()) // _BYTES_PER_TOKEN if tokens is None else len(tokens)
