# SPDX-License-Identifier: Apache-2.0
"""4 bits in groups of 32 or 64 columns as a GPU keeps them: gguf.py's arrays of Q4_1.

Its blocks of 32 columns have a scale and an offset, both float16. The offset is rounded: that errs by less than a 128th
of a step between two numbers, where 16 bits of bfloat16 err by up to a 32nd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.formats.gguf import GgufArrays
from blink.formats.matrix import QuantizedMatrix
from blink.formats.schemes import ARRAY_GROUP, GGUF_UNIT, FormatId


def fits_arrays(columns: int) -> bool:
    """Tell whether rows of so many columns consist of whole blocks."""
    return columns % ARRAY_GROUP == 0


def pack_small_groups(matrix: QuantizedMatrix) -> GgufArrays:
    """Return the arrays of a matrix, whose groups are whole blocks."""
    assert matrix.zeros is not None
    scales, offsets = matrix.scales, -matrix.zeros.float() * matrix.scales
    words = torch.stack([scales, offsets], -1).half().view(torch.int32)[..., 0]
    words = words.repeat_interleave(matrix.group // ARRAY_GROUP, 1)
    codes = _pad(matrix.values, GGUF_UNIT).unflatten(1, (-1, 2, ARRAY_GROUP))
    pairs = codes[:, :, 0] | codes[:, :, 1] << 4
    blocks = GGUF_UNIT // ARRAY_GROUP
    return GgufArrays(FormatId.Q4_1, pairs.transpose(0, 1).contiguous(), _pad(words, blocks).T.contiguous())


def _pad(values: Tensor, multiple: int) -> Tensor:
    """Return rows filled up with zeros."""
    return functional.pad(values, (0, -values.shape[1] % multiple))
