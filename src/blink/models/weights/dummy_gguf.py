# SPDX-License-Identifier: Apache-2.0
"""Random weights in the formats of a GGUF file, of which the header alone is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import torch
from torch import Tensor

from blink.formats.gguf import GgufRows
from blink.models.spec import ModelSpec
from blink.models.weights.checkpoint import DummyCheckpoint, GgufCheckpoint
from blink.models.weights.gguf_places import Place
from blink.models.weights.kept_blocks import KeepBlocks

_Kind = gguf.GGMLQuantizationType
# Where a block's scales lie, and what gives its random numbers a mean of 0 and a standard deviation of 0.02.
_SCALES: Mapping[int, Mapping[int, float]] = {
    _Kind.Q4_0: {0: 4.3e-3},
    _Kind.Q4_1: {0: 4.3e-3, 2: -3.25e-2},
    _Kind.Q8_0: {0: 2.7e-4},
    _Kind.Q4_K: {0: 1.1e-4, 2: 8.5e-4},
    _Kind.Q5_K: {0: 5.6e-5, 2: 8.7e-4},
    _Kind.Q6_K: {208: 1.46e-5},
}


def draw_blocks(kind: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return random rows of blocks, uint8 [rows, bytes of a row], on the generator's device; kind: ggml's number."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[_Kind(kind)]
    shape, device = (rows, columns // values, num_bytes), generator.device
    blocks = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    for place, scale in _SCALES[kind].items():
        blocks[..., place : place + 2] = torch.tensor([scale], dtype=torch.float16, device=device).view(torch.uint8)
    return blocks.flatten(1)


class DummyGguf(GgufCheckpoint):
    """Random weights, matrices in the types of a file's tensors, equal for equal seeds and devices."""

    def __init__(self, path: Path, spec: ModelSpec, keep: KeepBlocks | None, drawn: DummyCheckpoint) -> None:
        """Open a file, which may end behind its header's tensors; drawn: what matrices of other types come from."""
        super().__init__(path, spec, keep)
        self._drawn = drawn

    def fill(self, name: str, target: Tensor) -> None:
        self._drawn.fill(name, target)

    def _read_parts(self, places: Sequence[Place]) -> list[GgufRows]:
        return [self._draw(place) for place in places]

    def _draw(self, place: Place) -> GgufRows:
        tensor = self._file.tensors[place.stored]
        *heights, columns = tensor.shape if place.expert is None else tensor.shape[1:]
        rows = math.prod(heights) if place.rows is None else len(place.rows)
        return GgufRows(int(tensor.kind), draw_blocks(int(tensor.kind), rows, columns, self._drawn.generator))
