# SPDX-License-Identifier: Apache-2.0
"""The updates of a model's weights, put together from those of modules."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from blink.adapters.module import Module
from blink.kernels.lora import LowRank, Updates


class GatheredUpdates:
    """Gathers them; experts without an update get zeros."""

    def __init__(self, like: Tensor) -> None:
        """Begin with none; like: a tensor of the updates' type and device."""
        self._like = like
        self._found: defaultdict[int, list[LowRank]] = defaultdict(list)
        self._of_experts: dict[tuple[int, int], LowRank] = {}
        self._filled: set[tuple[int, int, int]] = set()

    def add(self, module: Module, down: Tensor, up: Tensor) -> bool:
        """Add a module's update, or each expert's of a fused one; say whether none was there.

        down: [rank, in], of a fused module [experts, rank, in]; up: [out, rank], the scale in it, likewise.
        """
        if not module.is_of_experts:
            self._found[id(module.weight)].append(LowRank(module.rows, *map(self._place, (down, up))))
            return True
        if module.fused is None:
            down, up = down[None], up[None]
        first = module.expert or 0
        experts = range(module.num_experts) if module.expert is None else range(first, first + 1)
        ups = up.split([part.stop - part.start for part in module.parts], dim=1)
        added = [self._add_part(module, part, experts, down, own) for part, own in zip(module.parts, ups, strict=True)]
        return all(added)

    def _add_part(self, module: Module, part: slice, experts: range, down: Tensor, up: Tensor) -> bool:
        key = id(module.weight), part.start
        if key not in self._of_experts:
            zeros = [self._like.new_zeros(module.num_experts, *tensor.shape[1:]) for tensor in (down, up)]
            self._of_experts[key] = LowRank(part, *zeros)
            self._found[id(module.weight)].append(self._of_experts[key])
        update, own = self._of_experts[key], {(*key, expert) for expert in experts}
        if own & self._filled:
            return False
        self._filled |= own
        place = slice(experts.start, experts.stop)
        update.down[place], update.up[place] = down, up
        return True

    def finish(self) -> Updates:
        """Return all that was added."""
        return {weight: tuple(each) for weight, each in self._found.items()}

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._like.device, self._like.dtype).contiguous()
