# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer with the methods of transformers' that scripts call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blink.request.rendering import Rendering, render_messages
from blink.text.assets import ModelAssets
from blink.text.template import ChatTemplate
from blink.text.tokenizer import without_marks


class Encoding(dict[str, Any]):
    """The token ids of a text, or of several, by the names that models take them by."""

    @property
    def input_ids(self) -> Any:
        """Return the token ids."""
        return self["input_ids"]


class PublicTokenizer:
    """Encode, decode and render chats as the engine does."""

    def __init__(self, assets: ModelAssets) -> None:
        self._assets = assets
        self._tokenizer = assets.tokenizer

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Return the token ids of a text, or of several."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = [self.encode(each, add_special_tokens=add_special_tokens) for each in text]
        return Encoding(input_ids=ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        tokens = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of several sequences."""
        return [self.decode(sequence, skip_special_tokens=skip_special_tokens) for sequence in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Return the vocabulary's entry of each token."""
        return self._tokenizer.token_name(ids) if isinstance(ids, int) else list(map(self._tokenizer.token_name, ids))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of each entry of the vocabulary; None for one that is not there."""
        return (
            self._tokenizer.token_id(tokens) if isinstance(tokens, str) else list(map(self._tokenizer.token_id, tokens))
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation: its token ids, or its text where it is not to tokenize.

        Raises:
            BadRequestError: the model has no chat template, or it refuses the messages.
        """
        rendering = Rendering(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template_of(chat_template, self._assets),
            variables={**variables, "tools": tools},
        )
        text = render_messages(conversation, rendering, self._assets)
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else without_marks(text)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """Return the first of the tokens that end the model's texts."""
        return next(iter(self._assets.eos_token_ids), None)

    @property
    def eos_token(self) -> str | None:
        """Return the first of the tokens that end the model's texts, by name."""
        return None if self.eos_token_id is None else self._tokenizer.token_name(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        """Return the token that begins the model's texts."""
        return self._assets.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of the token that begins the model's texts."""
        return None if self.bos_token is None else self._tokenizer.token_id(self.bos_token)

    @property
    def all_special_ids(self) -> list[int]:
        """Return the ids of all special tokens."""
        return sorted(self._tokenizer.special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Return the source of the chat template."""
        return self._assets.template_source or None


def template_of(source: str | None, assets: ModelAssets) -> ChatTemplate | None:
    """Return the template of a call that gives one; None leaves the model's.

    Raises:
        ConfigError: it is malformed.
    """
    return ChatTemplate(source, assets.special_tokens) if source else None
