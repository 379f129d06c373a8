# SPDX-License-Identifier: Apache-2.0
"""Which adapters the tokens of a step have."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blink.kernels.batch import Batch, Param
from blink.kernels.lora import AdapterStore, GroupedUpdates, StepUpdates, TokenUpdates, Updates
from blink.plan.site import Bucket


class Adapters(AdapterStore, Protocol):
    """Holds adapters by the index that the scheduler knows them by, and finds those of a step."""

    def find(self, batch: Batch, bucket: Bucket) -> StepUpdates | None:
        """Return the updates of a step's tokens; None where there are none."""
        ...


class HostAdapters:
    """Adapters in the host's memory, for steps that are run by it."""

    def __init__(self, num_adapters: int) -> None:
        self._held: list[Updates | None] = [None] * num_adapters

    def put(self, index: int, updates: Updates) -> None:
        """Hold an adapter."""
        self._held[index] = updates

    def clear(self, index: int) -> None:
        """Free an adapter."""
        self._held[index] = None

    def find(self, batch: Batch, bucket: Bucket) -> GroupedUpdates | None:
        """Return the updates of a step's tokens; None where no row has an adapter."""
        num_rows = bucket.rows
        slots = batch.params[batch.row_slots[:num_rows].long(), Param.ADAPTER]
        if not slots.any():
            return None
        places = torch.cat((batch.adapter_places.new_zeros(1), batch.adapter_places))[slots.long()]
        lengths = batch.query_starts[1 : num_rows + 1] - batch.query_starts[:num_rows]
        of_tokens = places.repeat_interleave(lengths)
        return GroupedUpdates([self._group(of_tokens, place) for place in places.unique().tolist() if place > 0])

    def _group(self, of_tokens: Tensor, place: int) -> TokenUpdates:
        updates = self._held[place - 1]
        assert updates is not None, "the scheduler runs an adapter that the host has freed"
        return TokenUpdates((of_tokens == place).nonzero()[:, 0], updates)
