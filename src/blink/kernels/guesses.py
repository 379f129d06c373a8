# SPDX-License-Identifier: Apache-2.0
"""Rows of a step whose next tokens a draft head guesses, and what they attend to meanwhile.

A row that follows another of its slot is sure if that one sampled its token. A slot's last sure row gets guesses, where
these are of use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import PLAIN_ATTENTION, AttentionOptions, HeadNorm
from blink.region.layout import field_offset, struct_dtype

if TYPE_CHECKING:
    from blink.models.layers import Attention

_HEAD_DRAFT = struct_dtype("HeadDraft")
# Words of a HeadDraft: the scheduler writes the first. The text's length, the count and the tokens follow each other.
RESTS_UNTIL, TEXT_LENGTH = (field_offset(_HEAD_DRAFT, name) // 4 for name in ("rests_until", "num_tokens"))
NUM_GUESSES, FIRST_GUESS = (field_offset(_HEAD_DRAFT, name) // 4 for name in ("count", "tokens"))
MOST_GUESSES = _HEAD_DRAFT.itemsize // 4 - FIRST_GUESS


class Guesses(Protocol):
    """The rows of a step, of which those that are not guessed behind may be left out."""

    step: Batch  # once it is open, one whose tokens are the rows: of its header, their number
    next_ids: Tensor  # [tokens]; the token behind each of the step's: of its prompt where that goes on, else the sample
    ends: Tensor  # [rows]; of the step's tokens, each row's last

    def open(self, cache: LayerCache) -> None:
        """Let rows attend to what they have in the head's cache, with room for guesses behind it."""
        ...

    def positions(self, guess: int) -> Tensor:
        """Return where each row's guess of a number stands in its text, [rows]; 1: the first that is read."""
        ...

    def attend_last(self, query: Tensor, options: AttentionOptions = PLAIN_ATTENTION) -> Tensor:
        """Attend from each row's last token, whose keys and values are stored; query: [rows, heads, head_dim]."""
        ...

    def attend(
        self,
        guess: int,
        qkv: Tensor,
        rotation: Tensor,
        norm: HeadNorm | None = None,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        """Store keys and values of each row's guess of a number, and attend from it."""
        ...

    def write(self, tokens: Tensor) -> None:
        """Write guessed tokens [rows, num_guesses] to batch.head_drafts."""
        ...


# Of a sampled step's batch, its tokens and rows, the guesses of a row, the head's attention, the type of its queries.
FindGuesses = Callable[[Batch, "tuple[int, int]", int, "Attention", torch.dtype], Guesses]


def count_blocks(num_guesses: int, block_size: int) -> int:
    """Return the blocks of a row for its guesses, and for the tokens before them in a block that is not full."""
    return -(-(block_size + num_guesses - 2) // block_size) if num_guesses > 1 else 0
