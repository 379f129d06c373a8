# SPDX-License-Identifier: Apache-2.0
"""The batch of one step, in fixed memory: what the scheduler fills and the model reads, and the sampled outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blink.region.layout import BATCH_HEADER, SLOT_PARAMS, NativeEnum
from blink.sampling_params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_TOKENS

HEADER_WORDS = BATCH_HEADER.itemsize // 4
PARAM_WORDS = SLOT_PARAMS.itemsize // 4


class Header(NativeEnum, struct="BatchHeader"):
    """The words of `Batch.header`."""


class Param(NativeEnum, struct="SlotParams"):
    """The columns of `Batch.params`; those up to FREQUENCY_PENALTY hold float32 bit patterns."""


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
    query_starts: Tensor  # [max_rows + 1]
    context_lens: Tensor  # [max_rows]; tokens in the row's KV cache after this step
    row_slots: Tensor  # [max_rows]; the row's entry in the tables of slots
    block_tables: Tensor  # [num_slots, max_blocks]
    tokens: Tensor  # [num_slots, max_model_len]; prompt, then generated
    params: Tensor  # [num_slots, PARAM_WORDS], see Param
    stop_tokens: Tensor  # [num_slots, MAX_STOP_TOKENS]
    bias_tokens: Tensor  # [num_slots, MAX_LOGIT_BIASES]
    bias_values: Tensor  # [num_slots, MAX_LOGIT_BIASES] float32
    sampled_tokens: Tensor  # [max_rows]
    sampled_logprobs: Tensor  # [max_rows] float32; written for rows that ask for logprobs
    top_tokens: Tensor  # [max_rows, MAX_LOGPROBS]; the first NUM_LOGPROBS of a row are written
    top_logprobs: Tensor  # [max_rows, MAX_LOGPROBS] float32

    @property
    def params_f32(self) -> Tensor:
        """View `params` as float32."""
        return self.params.view(torch.float32)

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
    ) -> Batch:
        """Allocate an empty batch (all zero, no row)."""

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            header=words(HEADER_WORDS),
            input_ids=words(max_tokens),
            positions=words(max_tokens),
            kv_slots=words(max_tokens),
            query_starts=words(max_rows + 1),
            context_lens=words(max_rows),
            row_slots=words(max_rows),
            block_tables=words(num_slots, max_blocks),
            tokens=words(num_slots, max_model_len),
            params=words(num_slots, PARAM_WORDS),
            stop_tokens=words(num_slots, MAX_STOP_TOKENS),
            bias_tokens=words(num_slots, MAX_LOGIT_BIASES),
            bias_values=words(num_slots, MAX_LOGIT_BIASES, dtype=torch.float32),
            sampled_tokens=words(max_rows),
            sampled_logprobs=words(max_rows, dtype=torch.float32),
            top_tokens=words(max_rows, MAX_LOGPROBS),
            top_logprobs=words(max_rows, MAX_LOGPROBS, dtype=torch.float32),
        )


def map_batch(array: Callable[[str, torch.dtype], Tensor], num_slots: int) -> Batch:
    """View the scheduler's arrays as the model's batch; `array` finds one by name, flat, as a type."""

    def ints(name: str, *shape: int) -> Tensor:
        return array(name, torch.int32).view(shape or (-1,))

    def floats(name: str, *shape: int) -> Tensor:
        return array(name, torch.float32).view(shape or (-1,))

    return Batch(
        header=ints("batch"),
        input_ids=ints("input_ids"),
        positions=ints("positions"),
        kv_slots=ints("kv_slots"),
        query_starts=ints("query_starts"),
        context_lens=ints("context_lens"),
        row_slots=ints("row_slots"),
        block_tables=ints("block_tables", num_slots, -1),
        tokens=ints("tokens", num_slots, -1),
        params=ints("params", num_slots, PARAM_WORDS),
        stop_tokens=ints("stop_tokens", num_slots, MAX_STOP_TOKENS),
        bias_tokens=ints("bias_tokens", num_slots, MAX_LOGIT_BIASES),
        bias_values=floats("bias_values", num_slots, MAX_LOGIT_BIASES),
        sampled_tokens=ints("sampled_tokens"),
        sampled_logprobs=floats("sampled_logprobs"),
        top_tokens=ints("top_tokens", -1, MAX_LOGPROBS),
        top_logprobs=floats("top_logprobs", -1, MAX_LOGPROBS),
    )
