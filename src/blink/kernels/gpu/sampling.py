# SPDX-License-Identifier: Apache-2.0
"""Sampling on a GPU by csrc/kernels/sampler/sample.cu: each row by a cluster of thread blocks, or by one block."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.constraint import Allowed, find_allowed
from blink.kernels.gpu.device import count_processors, has_clusters
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKENS

_CLUSTER = 8  # csrc/kernels/sampler/row_group.cuh's kRowCluster
_HEAD_BYTES = 11776  # csrc/kernels/sampler/sample.cu's kHeadBytes
_TYPES = {torch.bfloat16: "blink::Bf16", torch.float16: "blink::Half", torch.float32: "float"}
# Few rows leave most of the GPU to each: larger blocks. More rows share an SM.
_MOST_THREADS = 1024
_CLUSTERS, _CLUSTER_THREADS, _CLUSTER_BLOCKS_OF_SM = 16, 256, 4
_BLOCK_THREADS, _BLOCKS_OF_SM = 512, 2
_WORD_TOKENS, _WORD_BYTES = 32, 8  # csrc/sampler/penalties.h's ChangeWord


class Group(Enum):
    """Who samples a row."""

    CLUSTER = "ClusterGroup"
    BLOCK = "BlockGroup"


def find_group() -> Group:
    """Return who samples a row on this GPU: from Hopper on a cluster."""
    return Group.CLUSTER if has_clusters() else Group.BLOCK


def sample(
    logits: Tensor,
    batch: Batch,
    num_rows: int,
    group: Group | None = None,
    *,
    deterministic: bool = False,
    allowed: Allowed | None = None,
) -> None:
    """Compute sample of contiguous rows; group: None: find_group(); allowed: None: by their automata, which move on."""
    assert logits.stride(1) == 1 and batch.tokens.stride(1) == 1 and batch.params.is_contiguous()
    group = group or find_group()
    vocab_size, max_model_len = logits.shape[1], batch.tokens.stride(0)
    num_blocks = _CLUSTER if group is Group.CLUSTER else 1
    part_size = -(-vocab_size // (4 * num_blocks)) * 4
    change_words = -(-part_size // (2 * _WORD_TOKENS)) * 2
    most_changes = min(vocab_size, max_model_len + MAX_LOGIT_BIASES + MAX_STOP_TOKENS + 1)
    changes = torch.empty(num_rows, most_changes, dtype=torch.int32, device=logits.device)
    allowed = allowed or find_allowed(batch, num_rows, vocab_size)
    arguments = args(
        "SampleArgs",
        logits=logits,
        header=batch.header,
        row_slots=batch.row_slots,
        context_lens=batch.context_lens,
        params=batch.params,
        tokens=batch.tokens,
        stop_tokens=batch.stop_tokens,
        bias_tokens=batch.bias_tokens,
        bias_values=batch.bias_values,
        allowed=allowed.bits,
        lists=allowed.lists,
        may_end=allowed.may_end,
        changes=changes,
        sampled_tokens=batch.sampled_tokens,
        sampled_logprobs=batch.sampled_logprobs,
        top_tokens=batch.top_tokens,
        top_logprobs=batch.top_logprobs,
        stride=logits.stride(0),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        change_words=change_words,
    )
    threads, kernel = describe_kernel(logits, group, deterministic=deterministic)
    staged_bytes = part_size * logits.element_size() if group is Group.CLUSTER else 0
    launch(
        compile_kernel(kernel, "sampler/sample.cu"), (num_blocks, num_rows), threads, arguments, cluster=num_blocks,
        shared_bytes=_HEAD_BYTES + _WORD_BYTES * change_words + staged_bytes, pdl=has_clusters(),
    )  # fmt: skip


def describe_kernel(logits: Tensor, group: Group, *, deterministic: bool) -> tuple[int, str]:
    """Return the threads of a block, by which sums are cut, and the kernel's name."""
    if group is Group.CLUSTER:
        few, threads, blocks_of_sm = _CLUSTERS, _CLUSTER_THREADS, _CLUSTER_BLOCKS_OF_SM
    else:
        few = count_processors()
        threads, blocks_of_sm = _BLOCK_THREADS, _BLOCKS_OF_SM
    if logits.shape[0] <= few and not deterministic:
        threads, blocks_of_sm = _MOST_THREADS, 1
    is_aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0 and logits.shape[1] % 4 == 0
    of_group = f"blink::{group.value}<{threads}>, {_TYPES[logits.dtype]}"
    return threads, f"blink::sample_rows<{of_group}, {str(is_aligned).lower()}, {blocks_of_sm}>"
