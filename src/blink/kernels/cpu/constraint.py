# SPDX-License-Identifier: Apache-2.0
"""The tokens that a row's automaton allows, by the native library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Param
from blink.region.native import lib


class ConstrainedRow(ctypes.Structure):
    """Where one row's tables are (csrc/cpu/constrain.h)."""

    _fields_ = [
        ("automaton", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("token_starts", ctypes.c_void_p),
        ("token_text", ctypes.c_void_p),
        ("stop_tokens", ctypes.c_void_p),
        ("num_stop_tokens", ctypes.c_uint32),
        ("vocab_size", ctypes.c_uint32),
        ("num_generated", ctypes.c_uint32),
        ("last_token", ctypes.c_int32),
    ]


def list_allowed(allowed: Tensor, batch: Batch, slot: int, context_len: int) -> bool:
    """Set a bit for each token that may come next; say whether the text may end.

    allowed: int32 [ceil(vocab / 32)]; the slot has an automaton.
    """
    words = batch.params[slot].tolist()
    row = ConstrainedRow(
        batch.automata[words[Param.AUTOMATON] - 1].data_ptr(),
        batch.automaton_places[slot].data_ptr(),
        batch.token_starts.data_ptr(),
        batch.token_text.data_ptr(),
        batch.stop_tokens[slot].data_ptr(),
        words[Param.NUM_STOP_TOKENS],
        batch.token_starts.shape[0] - 1,
        max(context_len - words[Param.NUM_PROMPT_TOKENS], 0),
        int(batch.tokens[slot, context_len - 1]),
    )
    return bool(lib.blink_list_allowed(ctypes.addressof(row), allowed.data_ptr()))


def constrain(logits: Tensor, batch: Batch, slot: int, context_len: int) -> bool:
    """Hide what may not come next in one row's logits (float32 [vocab]) in place; say whether the text may end."""
    if int(batch.params[slot, Param.AUTOMATON]) == 0:
        return False
    vocab_size = logits.shape[0]
    allowed = torch.empty(-(-vocab_size // 32), dtype=torch.int32)
    may_end = list_allowed(allowed, batch, slot, context_len)
    bits = allowed[:, None] >> torch.arange(32, dtype=torch.int32) & 1
    logits.masked_fill_(bits.view(-1)[:vocab_size] == 0, -torch.inf)
    return may_end
