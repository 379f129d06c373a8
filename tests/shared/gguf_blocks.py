# SPDX-License-Identifier: Apache-2.0
"""Random rows in GGUF's formats, what the gguf package makes of them, and what a GEMM with them may differ by."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

Kind = gguf.GGMLQuantizationType
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K)
GPU_KINDS = (*KINDS, Kind.Q5_K)
# Where scales are.
HALVES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
# Of blocks whose numbers have a mean of about 0 and a deviation of about 0.05.
K_SCALES = {Kind.Q4_K: (2e-4, 1.5e-3), Kind.Q5_K: (1e-4, 1.55e-3), Kind.Q6_K: (4e-5,)}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def make_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> Bytes:
    """Return rows of random quants with scales of all sizes: zero, negative, subnormal."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for place in HALVES[kind]:
        scales = (rng.standard_normal((rows, columns // values)) * 10.0 ** rng.integers(-7, 1)).astype(np.float16)
        scales[rng.random(scales.shape) < 0.1] = 0
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def quantize(values: np.ndarray[Any, np.dtype[np.float32]], kind: Kind) -> Bytes:
    """Return matrices as a format has them; of K-quants, which the gguf package does not make, some like them."""
    if kind not in K_SCALES:
        return gguf.quants.quantize(values, kind)
    num_rows, columns = values.size // values.shape[-1], values.shape[-1]
    blocks = make_blocks(kind, num_rows, columns, num_rows).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for place, scale in zip(HALVES[kind], K_SCALES[kind], strict=True):
        blocks[:, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def dequantize(blocks: Bytes, kind: Kind) -> torch.Tensor:
    """The oracle."""
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def check_matmul(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Hold a GEMM against float64, within what float32 may round over a sum of such terms."""
    exact = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    assert found.shape == exact.shape
    assert bool(((found - exact).abs() <= terms * 2e-6 + 1e-30).all())
