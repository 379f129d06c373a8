# SPDX-License-Identifier: Apache-2.0
"""Make weights of arrays, which a GPU's kernels of GGUF's formats multiply with. Needs Triton when one is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufArrays, GgufRows, pack_rows
from blink.formats.schemes import FormatId


def make_planar(parts: Sequence[GgufArrays], columns: int, dtype: torch.dtype) -> QuantizedEmbedding:
    """Return a weight of parts of one number of columns, one below the other; dtype: that it computes in."""
    from blink.kernels.gpu.gemm.gguf_weight import PlanarGgufWeight

    return PlanarGgufWeight(parts, columns, dtype)


def pack_gguf(parts: Sequence[GgufRows], columns: int, device: torch.device, dtype: torch.dtype) -> QuantizedEmbedding:
    """Take the parts of a weight apart on a device; those in one format that follow each other become one."""
    joined: list[tuple[FormatId, list[Tensor]]] = []
    for part in parts:
        format = FormatId.of_ggml(part.format)
        if not joined or joined[-1][0] is not format:
            joined.append((format, []))
        joined[-1][1].append(part.blocks)
    return make_planar([pack_rows(format, blocks, device) for format, blocks in joined], columns, dtype)
