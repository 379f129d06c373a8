# SPDX-License-Identifier: Apache-2.0
"""What kernels of all kinds of recurrent layers agree on: which tokens belong to which sequence's state.

A sequence keeps a state and the last inputs of a convolution in its slot. At position 0 both count as zeros, whatever
the slot holds: nobody clears a slot. A slot below 0 is that of padding.

Rows of one token that follow each other and have one slot are siblings (Batch.has_siblings): all but the first may be
taken back. The slot's state takes in the first one alone. What the rule reads of the others is kept by positions. The
next step takes in as many of them as stay, its rows' lags, and then its own token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.layer_cache import StateCache

CHUNK = 64  # tokens of a prompt that are computed at once


class Rows(NamedTuple):
    """Which tokens belong to which sequence."""

    slots: Tensor  # int32 [rows]; below 0: the row is padding
    positions: Tensor  # int32 [rows]: of each row's first token
    starts: Tensor  # int32 [rows + 1]: where its tokens begin
    lags: Tensor | None = None  # int32 [rows]: tokens before its first that the state lacks; None: no row has siblings

    @classmethod
    def of(cls, batch: Batch, num_rows: int) -> Rows:
        """Describe the first rows of a batch, those that are padding among them."""
        starts, context = batch.query_starts[: num_rows + 1], batch.context_lens[:num_rows]
        slots = batch.row_slots[:num_rows].masked_fill(context == 0, -1)
        lags = batch.state_lags[:num_rows] if batch.has_siblings else None
        return cls(slots, context - starts.diff(), starts, lags)


# From a layer's projections and its weights. Returns each token's gated output [tokens, out_size], of the type of z,
# and advances the rows' slots.
Advance = Callable[[Any, StateCache, Rows, Any], Tensor]
