# SPDX-License-Identifier: Apache-2.0
"""The tokens that the automata of constrained rows allow, found on the GPU beside the model's last kernel."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Header, Param
from blink.kernels.cpu.constraint import list_allowed
from blink.kernels.gpu.decode.launch import can_launch, compile_kernel, launch

_THREADS, _TOKENS = 128, 1024  # csrc/gpu/constrain.cu's kConstrainThreads and kTokensOfBlock
SOURCE = "constrain.cu"
KERNEL = "blink::list_allowed_tokens"


class Allowed(NamedTuple):
    """What constrained rows may sample."""

    bits: Tensor  # int32 [rows, ceil(vocab / 32)]; of constrained rows
    may_end: Tensor  # int32 [rows]; whether the text may end here, 0 for unconstrained rows


class _Arguments(ctypes.Structure):  # csrc/gpu/constrain.cu's ConstrainArgs
    _fields_ = [
        ("header", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("stop_tokens", ctypes.c_void_p),
        ("automata", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("token_starts", ctypes.c_void_p),
        ("token_text", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("may_end", ctypes.c_void_p),
        ("max_model_len", ctypes.c_uint32),
        ("vocab_size", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
    ]


def find_allowed(batch: Batch, num_rows: int, vocab_size: int) -> Allowed:
    """Return what the rows may sample; the rows' slots move on by their last tokens."""
    words = -(-vocab_size // 32)
    device = batch.params.device
    may_end = torch.empty(num_rows, dtype=torch.int32, device=device)
    allowed = Allowed(torch.empty(num_rows, words, dtype=torch.int32, device=device), may_end)
    if device.type != "cuda":  # Triton's interpreter
        _find_on_host(allowed, batch, num_rows)
        return allowed
    known_size = batch.token_starts.shape[0] - 1
    arguments = _Arguments(
        *(tensor.data_ptr() for tensor in (batch.header, batch.row_slots, batch.context_lens, batch.params)),
        *(tensor.data_ptr() for tensor in (batch.tokens, batch.stop_tokens, batch.automata, batch.automaton_places)),
        *(tensor.data_ptr() for tensor in (batch.token_starts, batch.token_text, *allowed)),
        batch.tokens.stride(0),
        min(vocab_size, known_size),
        words,
    )
    launch(
        compile_kernel(KERNEL, SOURCE),
        (-(-words * 32 // _TOKENS), num_rows),
        _THREADS,
        arguments,
        programmatic=can_launch(),
    )
    return allowed


def _find_on_host(allowed: Allowed, batch: Batch, num_rows: int) -> None:
    allowed.may_end.zero_()
    for row in range(min(num_rows, int(batch.header[Header.NUM_ROWS]))):
        slot, context_len = int(batch.row_slots[row]), int(batch.context_lens[row])
        if int(batch.params[slot, Param.AUTOMATON]) > 0:
            allowed.may_end[row] = list_allowed(allowed.bits[row], batch, slot, context_len)
