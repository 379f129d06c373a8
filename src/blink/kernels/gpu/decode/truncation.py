# SPDX-License-Identifier: Apache-2.0
"""The thresholds of rows with top-k, top-p or min-p, each searched by a cluster of thread blocks."""

from __future__ import annotations

import ctypes

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.decode.launch import compile_kernel, launch
from blink.kernels.gpu.sampling_rows import Parts

_SOURCE = "decode/truncation.cu"
_THREADS, _CLUSTER = 256, 8  # csrc/gpu/decode/truncation.cu's kTruncationThreads and kTruncationCluster
_SUMS_BYTES = 4 * 16 * (_THREADS // 32 + 2 * _CLUSTER)  # its TruncationShared, without the values


class _Arguments(ctypes.Structure):  # its TruncationArgs
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("lowest", ctypes.c_void_p),
        ("header", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("thresholds", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("width", ctypes.c_uint32),
        ("num_parts", ctypes.c_uint32),
    ]


def find_thresholds(parts: Parts, batch: Batch, thresholds: Tensor, arrivals: Tensor, width: int) -> None:
    """Write the least logit that may be drawn of each truncated row to thresholds, and 0 to its arrivals.

    parts: of the rows, `width` logits of each; thresholds: float32 [rows], NaN where nothing can be sampled.
    """
    num_rows, num_parts = parts.best.shape
    assert width % 4 == 0 and batch.params.is_contiguous()
    arguments = _Arguments(
        parts.scaled.data_ptr(),
        parts.best.data_ptr(),
        parts.lowest.data_ptr(),
        batch.header.data_ptr(),
        batch.row_slots.data_ptr(),
        batch.params.data_ptr(),
        thresholds.data_ptr(),
        arrivals.data_ptr(),
        width,
        num_parts,
    )
    values_bytes = -(-width // 4 // _CLUSTER) * 16
    launch(
        compile_kernel("blink::find_thresholds", _SOURCE),
        (_CLUSTER, num_rows),
        _THREADS,
        arguments,
        cluster=_CLUSTER,
        shared_bytes=_SUMS_BYTES + values_bytes,
    )
