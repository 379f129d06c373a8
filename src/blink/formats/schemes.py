# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint's matrices are quantized. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PACKED_GROUP = 128  # columns that share a scale in what a GPU's kernels read
_GROUP_BYTES = 4 / PACKED_GROUP  # of scales and zero points, as a GPU keeps them; of MXFP4 1 / 32

Storage = Literal["fp8", "awq", "gptq", "packed", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of the quantized matrices; which these are, the files show."""

    storage: Storage  # how the tensors lie in the files; packed: compressed-tensors' words of 4 bits
    zero_offset: int = 0  # of 4 bits: what is to be added to a stored zero point
    has_groups: bool = True  # columns of a row share scales by the group; else each row has one
    group: int = PACKED_GROUP  # columns of a group; MXFP4's are a part of it
    output: Quantization | None = None  # of the output layer, where it is not tied; None: it has 16 bits

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 8 if self.storage == "fp8" else 4

    @property
    def experts_only(self) -> bool:
        """Tell whether all other matrices have 16 bits."""
        return self.storage == "mxfp4"

    @property
    def can_stay(self) -> bool:
        """Tell whether a GPU has kernels that multiply such matrices as they are."""
        return self.group == PACKED_GROUP

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight that a GPU reads, with its part of the scales."""
        if not self.can_stay:
            return 2
        return self.bits / 8 + (_GROUP_BYTES if self.has_groups else 0)

    @property
    def kept_bytes(self) -> float:
        """Bytes of a weight in a GPU's memory, but of experts: the groups' scales of FP8 lie there in two orders."""
        has_both = self.storage == "fp8" and self.has_groups and self.can_stay
        return self.weight_bytes + (_GROUP_BYTES if has_both else 0)

    @property
    def title(self) -> str:
        """The scheme in words."""
        if self.storage == "fp8":
            return "FP8 in blocks" if self.has_groups else "FP8 per channel"
        return f"4 bits ({self.storage.upper()})" if self.storage != "packed" else "4 bits (compressed-tensors)"


FP8_ROWS = Quantization("fp8", has_groups=False)  # what --quantization fp8 makes
