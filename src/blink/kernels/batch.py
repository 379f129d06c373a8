# SPDX-License-Identifier: Apache-2.0
"""The batch of one step, in fixed memory: what the scheduler fills and the model reads, and the sampled outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from blink.region.layout import (
    AUTOMATON_PLACE,
    BATCH_HEADER,
    CONSTANTS,
    SLOT_PARAMS,
    STEP_BUFFERS,
    NativeEnum,
    StepKind,
    own_fields,
    struct_dtype,
)
from blink.sampling_params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS

HEADER_WORDS = BATCH_HEADER.itemsize // 4
PARAM_WORDS = SLOT_PARAMS.itemsize // 4
AUTOMATON_BYTES = CONSTANTS["max_automaton_bytes"]
PLACE_WORDS = AUTOMATON_PLACE.itemsize // 4
HEAD_DRAFT_WORDS = struct_dtype("HeadDraft").itemsize // 4
LISTS_OF_SLOT = CONSTANTS["lists_of_slot"]


class Header(NativeEnum, struct="BatchHeader"):
    """The words of `Batch.header`."""


class Param(NativeEnum, struct="SlotParams"):
    """The columns of `Batch.params`; those that the struct has as floats hold float32 bit patterns."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Describe one ragged step: decode rows first, then rows of several tokens.

    Row r owns tokens query_starts[r] .. query_starts[r + 1]. Everything is int32 unless noted. Tokens and rows beyond
    the header's counts are padding: kv_slots -1, input_ids within the vocabulary, query_starts repeating the last one.
    """

    header: Tensor  # [HEADER_WORDS], see Header
    input_ids: Tensor  # [max_tokens]
    positions: Tensor  # [max_tokens]
    kv_slots: Tensor  # [max_tokens]; block * block_size + offset that takes the token's K and V
    window_kv_slots: Tensor  # the same in window blocks; [0] where layers with a window have the others' blocks
    query_starts: Tensor  # [max_rows + 1]
    context_lens: Tensor  # [max_rows]; tokens in the row's KV cache after this step
    row_slots: Tensor  # [max_rows]; the row's entry in the tables of slots
    state_sources: Tensor  # [max_rows]; index + 1 of the snapshot that the row's recurrent states begin with; 0: none
    state_targets: Tensor  # [max_rows]; of the snapshot that is made of them at the end
    state_lags: Tensor  # [max_rows]; tokens before the row's first that its recurrent states have to take in yet
    block_tables: Tensor  # [num_slots, max_blocks]
    window_tables: Tensor  # the same of window blocks, in which those behind the window are no longer the slot's
    tokens: Tensor  # [num_slots, max_model_len]; prompt, then generated
    params: Tensor  # [num_slots, PARAM_WORDS], see Param
    stop_tokens: Tensor  # [num_slots, MAX_STOP_TOKENS]
    bias_tokens: Tensor  # [num_slots, MAX_LOGIT_BIASES]
    bias_values: Tensor  # [num_slots, MAX_LOGIT_BIASES] float32
    adapter_places: Tensor  # [num_adapter_slots]; index + 1 of the adapter in each slot that params name; 0: none
    automata: Tensor  # [num_automata, AUTOMATON_BYTES] uint8
    automaton_places: Tensor  # [num_slots, lists * PLACE_WORDS]; where the slot's text stands in its automaton
    token_bitmasks: Tensor  # [num_slots, lists * ceil(vocab / 32)]; tokens that may come next, a bit each
    token_starts: Tensor  # [vocab_size + 1]; where each token's bytes are in token_text
    token_text: Tensor  # [vocab_bytes] uint8
    sampled_tokens: Tensor  # [max_rows]
    sampled_logprobs: Tensor  # [max_rows] float32; written for rows that ask for logprobs
    top_tokens: Tensor  # [max_rows, MAX_LOGPROBS]; the first NUM_LOGPROBS of a row are written
    top_logprobs: Tensor  # [max_rows, MAX_LOGPROBS] float32
    head_drafts: Tensor  # [num_slots, HEAD_DRAFT_WORDS], as csrc's HeadDraft; [num_slots, 0] without a draft head
    prompt_logprobs: Tensor  # [max_tokens] float32; of the prompt token behind each, where its slot asks for it
    prompt_top_tokens: Tensor  # [max_tokens, MAX_LOGPROBS]
    prompt_top_logprobs: Tensor  # [max_tokens, MAX_LOGPROBS] float32
    vectors: Tensor  # [max_rows, floats of a vector] float32; of rows that end their prompts, where the model pools

    @property
    def params_f32(self) -> Tensor:
        """View `params` as float32."""
        return self.params.view(torch.float32)

    @property
    def has_windows(self) -> bool:
        """Whether layers with a window have blocks of their own."""
        return self.window_tables.numel() > 0

    @property
    def num_lists(self) -> int:
        """How many lists of tokens, and places in its automaton, a slot has."""
        return self.automaton_places.shape[1] // PLACE_WORDS

    @property
    def has_siblings(self) -> bool:
        """Whether several rows of a step may be of one slot, at positions that follow each other."""
        return self.num_lists > LISTS_OF_SLOT

    def find_tables(self, window: int) -> Tensor:
        """Return the tables of the blocks of a layer with a window, 0 for none."""
        return self.window_tables if window and self.has_windows else self.block_tables

    def find_kv_slots(self, window: int) -> Tensor:
        """Return where such a layer's keys and values go."""
        return self.window_kv_slots if window and self.has_windows else self.kv_slots

    @classmethod
    def allocate(
        cls,
        *,
        max_tokens: int,
        max_rows: int,
        num_slots: int,
        max_blocks: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        num_automata: int = 0,
        vocab_size: int = 0,
        vocab_bytes: int = 0,
        has_windows: bool = False,
        vector_floats: int = 0,
        most_siblings: int = 0,
        num_adapter_slots: int = 0,
        has_draft_head: bool = False,
    ) -> Batch:
        """Allocate an empty batch (all zero, no row); without automata, no row can be constrained.

        has_windows: layers with a window have blocks of their own. vector_floats: of a vector, where the model pools.
        most_siblings: rows of a slot in one step, besides its first.
        """
        lengths = {
            "header": HEADER_WORDS,
            "input_ids": max_tokens,
            "positions": max_tokens,
            "kv_slots": max_tokens,
            "window_kv_slots": has_windows * max_tokens,
            "query_starts": max_rows + 1,
            "automata": num_automata,
            "adapter_places": num_adapter_slots,
            "token_starts": vocab_size + 1,
            "token_text": vocab_bytes,
        } | dict.fromkeys(_OF_TOKENS, max_tokens)
        widths = _WIDTHS | {"block_tables": max_blocks, "tokens": max_model_len}
        widths["vectors"] = vector_floats
        widths["head_drafts"] = has_draft_head * HEAD_DRAFT_WORDS
        widths["window_tables"] = has_windows * max_blocks
        num_lists = LISTS_OF_SLOT + most_siblings
        widths["automaton_places"], widths["token_bitmasks"] = num_lists * PLACE_WORDS, num_lists * -(-vocab_size // 32)

        def zeros(name: str) -> Tensor:
            length = lengths.get(name, num_slots if name in _OF_SLOTS else max_rows)
            shape = (length, widths[name]) if name in widths else (length,)
            return torch.zeros(shape, dtype=_dtype(name), device=device)

        return cls(**{field.name: zeros(field.name) for field in fields(cls)})


# Elements of one row of the tables, where the model's sizes do not say it.
_WIDTHS = {
    "params": PARAM_WORDS,
    "stop_tokens": MAX_STOP_TOKENS,
    "bias_tokens": MAX_LOGIT_BIASES,
    "bias_values": MAX_LOGIT_BIASES,
    "top_tokens": MAX_LOGPROBS,
    "top_logprobs": MAX_LOGPROBS,
    "prompt_top_tokens": MAX_LOGPROBS,
    "prompt_top_logprobs": MAX_LOGPROBS,
    "automata": AUTOMATON_BYTES,
}
_OF_TOKENS = ("prompt_logprobs", "prompt_top_tokens", "prompt_top_logprobs")
_OF_SLOTS = {"block_tables", "window_tables", "tokens", "params", "stop_tokens", "bias_tokens", "bias_values"}
_OF_SLOTS |= {"automaton_places", "token_bitmasks", "head_drafts"}
_OF_STEP = {*own_fields(STEP_BUFFERS)}
_FLOATS = {"bias_values", "sampled_logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"}
_FLOATS |= {"vectors"}
_BYTES = {"automata", "token_text"}


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name in _FLOATS else torch.uint8 if name in _BYTES else torch.int32


def map_batch(array: Callable[[str, torch.dtype], Tensor], num_slots: int, kind: StepKind) -> Batch:
    """View the scheduler's arrays as the model's batch; `array` finds one by name, flat, as a type.

    kind: which of the steps it is.
    """

    rows = array(kind.array("sampled_tokens"), torch.int32).numel()

    def view(name: str) -> Tensor:
        flat = array(kind.array(name) if name in _OF_STEP else name, _dtype(name))
        if name == "vectors":
            return flat.view(rows, flat.numel() // rows)
        if name in _OF_SLOTS:
            return flat.view(num_slots, flat.numel() // num_slots)
        return flat.view(-1, _WIDTHS[name]) if name in _WIDTHS else flat

    return Batch(**{field.name: view(field.name) for field in fields(Batch)})
