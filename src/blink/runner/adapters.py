# SPDX-License-Identifier: Apache-2.0
"""Which adapters the tokens of a step have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Param
from blink.kernels.lora import StepUpdates, TokenUpdates, Updates


def find_updates(batch: Batch, num_rows: int, held: Sequence[Updates | None]) -> StepUpdates | None:
    """Return the updates of a step's tokens; None where no row has an adapter.

    held: the adapters in the host's memory, by the index that the scheduler knows them by.
    """
    slots = batch.params[batch.row_slots[:num_rows].long(), Param.ADAPTER]
    if not slots.any():
        return None
    places = torch.cat((batch.adapter_places.new_zeros(1), batch.adapter_places))[slots.long()]
    lengths = batch.query_starts[1 : num_rows + 1] - batch.query_starts[:num_rows]
    of_tokens = places.repeat_interleave(lengths)
    return StepUpdates([_group(of_tokens, place, held) for place in places.unique().tolist() if place > 0])


def _group(of_tokens: Tensor, place: int, held: Sequence[Updates | None]) -> TokenUpdates:
    updates = held[place - 1]
    assert updates is not None, "the scheduler runs an adapter that the host has freed"
    return TokenUpdates((of_tokens == place).nonzero()[:, 0], updates)
