# SPDX-License-Identifier: Apache-2.0
"""Logprobs in the two forms of the API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blink.text.generation import TokenLogprob
from blink.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no infinity


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


class LogprobFormat:
    """How one response writes its logprobs."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool, always_sampled: bool = False) -> None:
        """Write token ids instead of texts, or the sampled token among its alternatives in chats too."""
        self._tokenizer = tokenizer
        self._always_sampled = always_sampled
        self._as_token_ids = as_token_ids

    def completion(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Return /v1/completions' parallel lists; `offset` is the place of the first token in the text."""
        offsets: list[int] = []
        for entry in entries:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(entry.token))
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": [self._name(entry.token) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
        }

    def echoed(self, first: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return completion() of a prompt and its output; the prompt's first token has no logprob."""
        rest = self.completion(entries, len(self._tokenizer.token_text(first)))
        heads = {"text_offset": 0, "token_logprobs": None, "tokens": self._name(first), "top_logprobs": None}
        return {key: [head, *rest[key]] for key, head in heads.items()}

    def prompt(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
        """Return vLLM's prompt_logprobs: for each token a mapping by id; `rank` is null beyond those asked for."""
        return [None, *(self._ranked(entry) for entry in entries)]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        return {
            str(token): {"logprob": _finite(logprob), "rank": ranks.get(token), "decoded_token": self._name(token)}
            for token, logprob in _rivals(entry).items()
        }

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return /v1/chat/completions' list of tokens."""
        return {"content": [self._content(entry) for entry in entries]}

    def _content(self, entry: TokenLogprob) -> dict[str, Any]:
        tops = _rivals(entry).items() if self._always_sampled else entry.top
        return {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*top) for top in tops]}

    def length(self, entries: Sequence[TokenLogprob]) -> int:
        """Return the characters by which these tokens move the text offset."""
        return sum(len(self._tokenizer.token_text(entry.token)) for entry in entries)

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        rivals = _rivals(entry)
        keys = {entry.token: self._name(entry.token)}  # as in the list of tokens
        for token in rivals:
            if token not in keys:
                taken = keys.values()
                keys[token] = next(name for name in self._names(token) if name and name not in taken)
        return {keys[token]: _finite(logprob) for token, logprob in rivals.items()}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._name(token), "logprob": _finite(logprob), "bytes": list(data)}

    def _name(self, token: int) -> str:
        return _id_name(token) if self._as_token_ids else self._tokenizer.token_text(token)

    def _names(self, token: int) -> Iterator[str]:
        """Yield names of a token, each telling it apart from more others: texts may be the same."""
        if not self._as_token_ids:
            yield _text_or_bytes(self._tokenizer.token_bytes(token))
            yield self._tokenizer.token_name(token)
        yield _id_name(token)


def _text_or_bytes(data: bytes) -> str:
    """Return a token's text; parts of characters as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _rivals(entry: TokenLogprob) -> dict[int, float]:
    """Return the token itself, then the most likely ones, also where it is not among them."""
    return {entry.token: entry.logprob, **dict(entry.top)}
