# SPDX-License-Identifier: Apache-2.0
"""How matrices of a GGUF file stay quantized on a device, and their rows as the file holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufRows
from blink.formats.gguf_experts import GgufExperts
from blink.kernels.cpu.gguf_weight import GgufWeight

# Takes all experts' rows, a shape, what allocates and a device: formats/gguf_experts.py's pack_experts().
_MakeExperts = Callable[
    [Iterable[Sequence[GgufRows]], tuple[int, int, int], Callable[..., Tensor], torch.device], GgufExperts
]


@dataclass(frozen=True, slots=True)
class KeepBlocks:
    """How matrices stay quantized: what makes a weight on a device of rows as a file holds them, and of columns."""

    make: Callable[[Sequence[GgufRows], int, torch.device], QuantizedEmbedding]
    device: torch.device  # where weights are, unless another is given
    make_experts: _MakeExperts | None  # on a GPU, what makes one weight of all experts; None: each matrix is a weight

    @property
    def on_gpu(self) -> bool:
        """Tell whether matrices stay on a GPU."""
        return self.make_experts is not None


class StoredRows(NamedTuple):
    """Matrices one below the other, as a file holds them."""

    parts: list[GgufRows]
    columns: int


KEEP_ON_CPU = KeepBlocks(lambda parts, columns, _: GgufWeight(parts, columns), torch.device("cpu"), None)
