# SPDX-License-Identifier: Apache-2.0
"""Sampling by clusters of thread blocks: one draws a token from a row, another one finds its best logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.decode.launch import compile_kernel, launch
from blink.kernels.gpu.sampling_rows import Parts

# Few rows leave most of the GPU to each cluster: larger blocks.
_FEW_ROWS, _FEW_ROWS_THREADS, _THREADS = 16, 1024, 256
_CLUSTER = 8  # csrc/gpu/decode/cluster_row.cuh's kRowCluster
_HEAD_BYTES = 11776  # csrc/gpu/decode/sample.cu's kHeadBytes
_TYPES = {torch.bfloat16: "blink::Bf16", torch.float16: "blink::Half", torch.float32: "float"}


def can_read(logits: Tensor) -> bool:
    """Tell whether clusters can read rows of logits as the model made them: four at a time."""
    return logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0 and logits.shape[1] % 4 == 0


def sample_rows(
    logits: Tensor, parts: Parts, changed: Tensor, batch: Batch, width: int, *, finds_logprobs: bool
) -> None:
    """Draw a token of each row that is not greedy, and find the logprobs of rows that ask for them.

    What is found of a row becomes that of its first part. logits: [rows, vocab]; changed: int32 [rows], whether a row
    is drawn from its parts' `width` scaled logits. Without can_read() all must be, and logprobs cannot be found.
    """
    num_rows, num_parts = parts.best.shape
    assert width % 4 == 0 and batch.params.is_contiguous()
    arguments = args(
        "SampleArgs",
        logits=logits,
        scaled=parts.scaled,
        changed=changed,
        header=batch.header,
        row_slots=batch.row_slots,
        context_lens=batch.context_lens,
        params=batch.params,
        best=parts.best,
        tokens=parts.tokens,
        largest=parts.raw_largest,
        mass=parts.raw_mass,
        top_tokens=batch.top_tokens if finds_logprobs else None,
        top_logprobs=batch.top_logprobs if finds_logprobs else None,
        stride=logits.stride(0),
        vocab_size=logits.shape[1],
        width=width,
        num_parts=num_parts,
    )
    threads = _FEW_ROWS_THREADS if num_rows <= _FEW_ROWS else _THREADS
    part_bytes = -(-logits.shape[1] // (4 * _CLUSTER)) * 4 * logits.element_size()
    launch(
        compile_kernel(f"blink::sample_rows<{_TYPES[logits.dtype]}, {threads}>", "decode/sample.cu"),
        (_CLUSTER, 2 * num_rows),
        threads,
        arguments,
        cluster=_CLUSTER,
        shared_bytes=_HEAD_BYTES + part_bytes,
    )
