# SPDX-License-Identifier: Apache-2.0
"""Runs plans on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blink.kernels.gpu.attention.decode import decode_attention
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
from blink.runner.deterministic_device import DeterministicDevice
from blink.runner.gpu_device import DECODE_ATTENTION, GATHERED, PERMUTED, GpuDevice
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


def _attend_decoding(step: Step, qkv: Tensor, index: int) -> Tensor:
    model = step.model
    layer, table = model.layers[index], model.rotary_tables[model.table_of[index]]
    return decode_attention(
        qkv,
        step.kv_cache[index],
        step.batch,
        table,
        layer.head_norm,
        kv_scales=layer.attention.kv_scales,
        hi_lo=step.plan.layers[index].output.reads,
    )


class GpuCode:
    """Runs them."""

    def __init__(self, *, deterministic: bool = False) -> None:
        """Run them by all kernels, or by those that give a token the same bits in any step."""
        self.device = DeterministicDevice() if deterministic else GpuDevice()
        mixtures = {PERMUTED: _place_experts, GATHERED: mix_experts}
        experts = MixtureKernels(mixtures, choose_experts, choose_of_rows, add_shared)
        self.kernels = Kernels.of(self.device, experts, latent.KERNELS)
        self.attentions = {DECODE_ATTENTION: _attend_decoding}
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
        return WriterNorms(step) if step.updates is None else UpdatedWriterNorms(step, step.updates)
