# SPDX-License-Identifier: Apache-2.0
"""Sampling on the CPU, by the native library: csrc/cpu/sampler.h."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from blink.kernels.batch import PLACE_WORDS, Batch, Header
from blink.kernels.cpu.thread_pool import find_helpers
from blink.region.layout import new_struct
from blink.region.native import lib

_ARRAYS = (
    "row_slots", "context_lens", "params", "tokens", "stop_tokens", "bias_tokens", "bias_values",
    "automata", "automaton_places", "token_bitmasks", "token_starts", "token_text",
    "sampled_tokens", "sampled_logprobs", "top_tokens", "top_logprobs",
)  # fmt: skip


def sample(logits: Tensor, batch: Batch, num_rows: int) -> None:
    """Compute sample, each row by one thread."""
    logits = logits.float()
    rows = describe_rows(logits, batch, min(num_rows, int(batch.header[Header.NUM_ROWS])))
    lib.blink_sample(rows.ctypes.data, find_helpers() if num_rows > 1 else None)


def describe_rows(logits: Tensor, batch: Batch, num_rows: int) -> npt.NDArray[np.void]:
    """Return csrc's SampledRows; logits: float32 [rows, vocab], alive as long as that is used."""
    vocab_size, list_vocab = logits.shape[1], batch.token_starts.shape[0] - 1
    assert logits.stride(1) == 1 and batch.tokens.stride(1) == 1
    assert batch.automata.shape[0] == 0 or list_vocab == vocab_size
    num_lists = batch.automaton_places.shape[1] // PLACE_WORDS
    assert batch.token_bitmasks.shape[1] == num_lists * -(-list_vocab // 32)
    arrays: dict[str, Any] = {name: getattr(batch, name).data_ptr() for name in _ARRAYS}
    return new_struct(
        "SampledRows",
        **arrays,
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        vocab_size=vocab_size,
        list_vocab=list_vocab,
        max_model_len=batch.tokens.stride(0),
        num_rows=num_rows,
        num_lists=num_lists,
    )
