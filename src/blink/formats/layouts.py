# SPDX-License-Identifier: Apache-2.0
"""Matrix, ExpertMatrices: a weight's sizes, and how it lies in memory, by which kernels say whether they take it.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from blink.formats.schemes import Encoding


class Layout(Enum):
    """How a weight lies in memory."""

    ROWS = "rows"  # a tensor [out, in]
    BLOCKED = "blocked"  # a tensor in oneDNN's blocks
    UNITS = "units"  # formats/packed.py: units of 128 bytes, as the GPU's kernels read them
    GGUF = "GGUF"  # as a GGUF file has it, or in arrays of its parts


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [n, k] that rows of activations are multiplied with."""

    n: int
    k: int
    layout: Layout
    encoding: Encoding | None  # None: of no kernel that was written for one encoding
    dtype: str = "bfloat16"  # of the activations

    @property
    def is_packed(self) -> bool:
        """Tell whether it is quantized, in an order of the GPU's kernels."""
        return self.layout is Layout.UNITS


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices [2 * size, hidden] and [hidden, size] of a layer's experts, of which a token has a few."""

    experts: int
    top_k: int
    hidden: int
    size: int
    encodings: tuple[Encoding | None, Encoding | None]  # of both; None: each expert has its own
    is_plain: bool = True  # SiLU between them, no biases, and all of the router's experts
    dtype: str = "bfloat16"  # of the activations

    @property
    def encoding(self) -> Encoding | None:
        """How both are kept; None: not alike."""
        return self.encodings[0] if self.encodings[0] == self.encodings[1] else None

    def count_pairs(self, rows: int) -> int:
        """Return how many pairs of a token and one of its experts so many rows have."""
        return rows * self.top_k
