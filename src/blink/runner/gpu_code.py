# SPDX-License-Identifier: Apache-2.0
"""Runs plans on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.gpu.attention.decode import decode_attention, list_tokens
from blink.kernels.gpu.guesses import GpuGuesses
from blink.kernels.gpu.latent import kernels as latent
from blink.kernels.gpu.layer_inputs import join_inputs
from blink.kernels.gpu.moe import permuted_experts
from blink.kernels.gpu.moe.router import choose_experts, choose_of_rows
from blink.kernels.gpu.moe.shared_gate import add_shared
from blink.kernels.gpu.recurrent import snapshots
from blink.models.layer_weights import MoeWeights
from blink.plan.execution_plan import NormStyle
from blink.plan.site import Bucket
from blink.runner.cpu_code import mix_experts
from blink.runner.deterministic_device import ORDERED_ATTENTION, DeterministicDevice
from blink.runner.gpu_device import DECODE_ATTENTION, GATHERED, PERMUTED, GpuDevice
from blink.runner.gpu_fused_updates import FusedWriterNorms
from blink.runner.gpu_ordered import OrderedNorms
from blink.runner.gpu_recurrences import RECURRENCES
from blink.runner.gpu_streams import ReaderNorms, WriterNorms
from blink.runner.gpu_updates import UpdatedWriterNorms
from blink.runner.step import Kernels, MixtureKernels, Step
from blink.runner.stream import Stream


def _place_experts(
    x: Tensor,
    logits: Tensor,
    mlp: MoeWeights,
    num_tokens: Tensor,
    weights: Tensor | None,
    updates: Any,  # noqa: ARG001 - of experts there are none where a plan has this
) -> Tensor:
    router, experts = mlp.spec.router, (mlp.gate_up, mlp.down)
    return permuted_experts.moe(
        x, logits, experts, num_tokens, top_k=router.top_k, renormalize=router.renormalize, weights=weights
    )


def _prepare_decoding(step: Step) -> Callable[[Tensor, int], Tensor]:
    return functools.partial(_attend_rows, step, step.batch)


def _prepare_ordered(step: Step) -> Callable[[Tensor, int], Tensor]:
    """Attend in one order: each token of a step with prompts is a row of its own."""
    if step.bucket.decoding:
        return functools.partial(_attend_rows, step, step.batch, ordered=True)
    tokens = list_tokens(step.batch, step.bucket.tokens, step.bucket.rows)
    return functools.partial(_attend_rows, step, tokens, ordered=True, stored=True)


def _attend_rows(
    step: Step, rows: Batch, qkv: Tensor, index: int, *, ordered: bool = False, stored: bool = False
) -> Tensor:
    model = step.model
    layer, table = model.layers[index], model.rotary_tables[model.table_of[index]]
    return decode_attention(
        qkv,
        step.kv_cache[index],
        rows,
        table,
        layer.head_norm,
        kv_scales=layer.attention.kv_scales,
        hi_lo=step.plan.layers[index].output.reads,
        ordered=ordered,
        stored=stored,
    )


class GpuCode:
    """Runs them."""

    def __init__(self, *, deterministic: bool = False) -> None:
        """Run them by all kernels, or by those that give a token the same bits in any step."""
        self.device = DeterministicDevice() if deterministic else GpuDevice()
        mixtures = {PERMUTED: _place_experts, GATHERED: mix_experts}
        experts = MixtureKernels(mixtures, choose_experts, choose_of_rows, add_shared)
        self.kernels = Kernels.of(self.device, experts, latent.KERNELS)
        self.attentions = {DECODE_ATTENTION: _prepare_decoding, ORDERED_ATTENTION: _prepare_ordered}
        self.recurrences = RECURRENCES
        self.copy_states, self.join_inputs = snapshots.copy_states, join_inputs
        self.find_guesses = GpuGuesses

    def planned_size(self, bucket: Bucket) -> Bucket:
        """Return the size itself."""
        return bucket

    def find_layers(self, step: Step, layers: range) -> None:
        """Return nothing: a graph runs all of a step's kernels."""

    def begin(self, step: Step) -> Stream:
        """Begin a step of few rows."""
        if step.plan.norms is NormStyle.READER:
            return ReaderNorms(step)
        if step.plan.norms is NormStyle.ORDERED:
            return OrderedNorms(step)
        if step.plan.norms is NormStyle.UPDATED:
            return FusedWriterNorms(step)
        return WriterNorms(step) if step.updates is None else UpdatedWriterNorms(step, step.updates)
