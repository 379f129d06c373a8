# SPDX-License-Identifier: Apache-2.0
"""Hides the tokens that a row's automaton does not allow, by the native library."""

from __future__ import annotations

import ctypes

from torch import Tensor

from blink.kernels.batch import Batch, Param
from blink.region.native import lib


class _Row(ctypes.Structure):  # csrc/cpu/constrain.h
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


def constrain(logits: Tensor, batch: Batch, slot: int, context_len: int) -> bool:
    """Hide tokens in one row's logits (float32 [vocab], contiguous) in place; say whether the text may end here."""
    words = batch.params[slot].tolist()
    if words[Param.AUTOMATON] == 0:
        return False
    row = _Row(
        batch.automata[words[Param.AUTOMATON] - 1].data_ptr(),
        batch.automaton_places[slot].data_ptr(),
        batch.token_starts.data_ptr(),
        batch.token_text.data_ptr(),
        batch.stop_tokens[slot].data_ptr(),
        words[Param.NUM_STOP_TOKENS],
        logits.shape[0],
        max(context_len - words[Param.NUM_PROMPT_TOKENS], 0),
        int(batch.tokens[slot, context_len - 1]),
    )
    return lib.blink_constrain(ctypes.addressof(row), logits.data_ptr()) > 0
