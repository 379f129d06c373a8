# SPDX-License-Identifier: Apache-2.0
"""The tokens that a row's automaton allows, by the native library."""

from __future__ import annotations

from torch import Tensor

from blink.kernels.batch import Batch, Param
from blink.region.layout import new_struct
from blink.region.native import lib


def list_allowed(batch: Batch, slot: int, context_len: int) -> tuple[Tensor | None, bool]:
    """Return the tokens that may come next, a bit for each, and whether the text may end; the slot moves on.

    The tokens are one of the slot's lists, int32 [ceil(vocab / 32)]; None: none may. The slot has an automaton.
    """
    words, num_lists = batch.params[slot].tolist(), batch.num_lists
    row = new_struct(
        "ConstrainedRow",
        automaton=batch.automata[words[Param.AUTOMATON] - 1].data_ptr(),
        places=batch.automaton_places[slot].data_ptr(),
        lists=batch.token_bitmasks[slot].data_ptr(),
        num_lists=num_lists,
        token_starts=batch.token_starts.data_ptr(),
        token_text=batch.token_text.data_ptr(),
        stop_tokens=batch.stop_tokens[slot].data_ptr(),
        num_stop_tokens=words[Param.NUM_STOP_TOKENS],
        vocab_size=batch.token_starts.shape[0] - 1,
        num_generated=max(context_len - words[Param.NUM_PROMPT_TOKENS], 0),
        last_token=int(batch.tokens[slot, context_len - 1]),
    )
    found = lib.blink_list_allowed(row.ctypes.data)
    lists = batch.token_bitmasks[slot].view(num_lists, -1)
    return (lists[found - 1] if found else None), bool(row["may_end"])
