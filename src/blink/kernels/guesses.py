# SPDX-License-Identifier: Apache-2.0
"""Rows of a step whose next tokens a draft head guesses, and what they attend to meanwhile.

A row that follows another of its slot is sure if that one sampled its token. A slot's last sure row gets guesses, where
these are of use. A guess is sampled as the model's token of that position will be: by the same parameters and noise. So
at any temperature a head whose logits are the model's guesses what the model samples (Daliri, Musco, Suresh, "Coupling
without communication and drafter-invariant speculative decoding", https://arxiv.org/abs/2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Param
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


class HeadTokens(NamedTuple):
    """The tokens of its model that a head has."""

    tokens: Tensor  # int64; of each of the head's logits
    vocab_size: int  # the model's


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

    def sample(self, guess: int, logits: Tensor, own: HeadTokens | None = None) -> Tensor:
        """Return each row's guess of a number, int64 [rows]; 0: the one behind its sample; logits: [rows, tokens].

        own: the tokens that a head has; None: all.
        """
        ...

    def write(self, tokens: Tensor) -> None:
        """Write guessed tokens [rows, num_guesses] to batch.head_drafts."""
        ...


# Of a sampled step's batch, its tokens and rows, the guesses of a row, the head's attention, the type of its queries.
FindGuesses = Callable[[Batch, "tuple[int, int]", int, "Attention", torch.dtype], Guesses]


def count_blocks(num_guesses: int, block_size: int) -> int:
    """Return the blocks of a row for its guesses, and for the tokens before them in a block that is not full."""
    return -(-(block_size + num_guesses - 2) // block_size) if num_guesses > 1 else 0


def guessed_batch(batch: Batch, slots: Tensor) -> Batch:
    """Return rows of one guess each, of some slots, that are sampled without automata and logprobs.

    context_lens are the caller's to give. What a text has behind its known tokens may be an older guess: penalties
    then count a wrong token.
    """
    params = batch.params.clone()
    params[:, Param.AUTOMATON] = 0
    params[:, Param.NUM_LOGPROBS] = -1
    return replace(batch, row_slots=slots, params=params, sampled_tokens=torch.zeros_like(slots))


def spread(logits: Tensor, own: HeadTokens | None) -> Tensor:
    """Return a head's logits [rows, vocab] of all the model's tokens; of those that it has not they are -inf."""
    if own is None:
        return logits
    found = logits.new_full((len(logits), own.vocab_size), -torch.inf)
    return found.index_copy_(1, own.tokens, logits)
