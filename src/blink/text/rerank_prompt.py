# SPDX-License-Identifier: Apache-2.0
"""The prompt by which Qwen3-Reranker scores a document: its card's template, in tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blink.errors import BadRequestError, PromptTooLongError
from blink.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PREFIX = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class RerankPrompts:
    """Makes the prompts of one request. Names of special tokens in its texts are letters like others."""

    def __init__(self, tokenizer: Tokenizer, instruction: str | None, longest: int) -> None:
        """Prepare for an instruction, None for the usual one; longest: tokens of a prompt at most."""
        self._tokenizer = tokenizer
        self._instruction = INSTRUCTION if instruction is None else instruction
        self._prefix, self._suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (_PREFIX, _SUFFIX))
        self._longest = longest
        self._room = longest - len(self._prefix) - len(self._suffix)

    def make(
        self, query: str, document: str, *, truncate: int | None = None, document_tokens: int | None = None
    ) -> npt.NDArray[np.int32]:
        """Return the prompt of a pair.

        truncate: tokens of the whole prompt at most, -1 for as many as fit: a document that is too long loses its end,
        the template never does. document_tokens: likewise of the document alone.

        Raises:
            BadRequestError: it is too long, or a text is no valid Unicode.
        """
        head = f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>:"
        room = self._room if truncate in (None, -1) else truncate - len(self._prefix) - len(self._suffix)
        if truncate is not None and not 0 < room <= self._room:
            least = len(self._prefix) + len(self._suffix) + 1
            told = f"truncate_prompt_tokens must be -1 or between {least} and {self._longest}, got {truncate}."
            raise BadRequestError(told, "truncate_prompt_tokens")
        self._check_length(head, document, is_cut=truncate is not None or document_tokens is not None)
        body = self._encode(f"{head} {document}")
        if document_tokens is not None:
            body = body[: len(self._encode(head)) + document_tokens]
        if truncate is not None:
            body = body[:room]
        if len(body) > self._room:
            raise self._too_long(str(len(body) + self._longest - self._room))
        return np.array([*self._prefix, *body, *self._suffix], np.int32)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.spell(text), add_special_tokens=False)

    def _check_length(self, head: str, document: str, *, is_cut: bool) -> None:
        """Refuse texts before the work of tokenizing them, if they cannot fit."""
        most = self._longest * self._tokenizer.max_token_chars
        if len(head) > most or (len(document) > most and not is_cut):
            raise self._too_long(f"more than {self._longest}")

    def _too_long(self, num_tokens: str) -> PromptTooLongError:
        error = PromptTooLongError(
            f"This model's maximum context length is {self._longest} tokens. However, a query with its document has"
            f" {num_tokens} tokens with the model's template. Shorten them, or give truncate_prompt_tokens.",
            "documents",
        )
        return error.measured(num_tokens, 0, self._longest)
