# SPDX-License-Identifier: Apache-2.0
"""Runs plans on the CPU."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from blink.kernels.cpu import delta_rule, latent, mamba
from blink.kernels.cpu.guesses import CpuGuesses
from blink.kernels.cpu.layer_inputs import join_inputs
from blink.kernels.cpu.router import choose_experts
from blink.kernels.cpu.snapshots import copy_states
from blink.kernels.moe import moe
from blink.kernels.router import choose_nothing
from blink.kernels.shared_expert import add_shared_expert
from blink.models.decoder import Decoder
from blink.models.layer_weights import MoeWeights
from blink.models.layers import DELTA_RULE
from blink.models.mamba import MAMBA_RULE
from blink.plan.site import Bucket
from blink.runner.cpu_device import EXPERTS, CpuDevice
from blink.runner.native_layers import NativeLayers
from blink.runner.step import Kernels, MixtureKernels, Step
from blink.runner.stream import RunLayers, Stream

_ANY_SIZE = Bucket(1, 1, decoding=False)


def mix_experts(
    x: Tensor,
    logits: Tensor,
    mlp: MoeWeights,
    num_tokens: Tensor,
    weights: Tensor | None,
    updates: Any,
) -> Tensor:
    """Return the mixture of experts of rows x [tokens, hidden]."""
    router = mlp.spec.router
    return moe(
        x,
        logits,
        mlp.gate_up,
        mlp.down,
        num_tokens,
        top_k=router.top_k,
        renormalize=router.renormalize,
        activation=mlp.spec.activation,
        biases=mlp.biases,
        weights=weights,
        first=mlp.first,
        updates=updates,
    )


class CpuCode:
    """Runs them."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        experts = MixtureKernels({EXPERTS: mix_experts}, choose_experts, choose_nothing, add_shared_expert)
        self.kernels = Kernels.of(self.device, experts, latent.KERNELS)
        self.attentions = {}
        self.recurrences = {DELTA_RULE: delta_rule.advance, MAMBA_RULE: mamba.advance}
        self.copy_states, self.join_inputs = copy_states, join_inputs
        self.find_guesses = CpuGuesses
        self._layers = WeakKeyDictionary[Decoder, NativeLayers]()

    def planned_size(self, bucket: Bucket) -> Bucket:  # noqa: ARG002
        """Return the one size: a step of each size takes the same kernels."""
        return _ANY_SIZE

    def find_layers(self, step: Step, layers: range) -> RunLayers | None:
        """Return what runs them where the library has all that they are made of and tokens attend one by one."""
        native = self._layers.get(step.model)
        if native is None or not native.is_of(step.kv_cache):
            native = self._layers[step.model] = NativeLayers(step.model, step.kv_cache)
        return native.find_run(step, layers)

    def begin(self, step: Step) -> Stream:
        """There is no other style."""
        raise AssertionError(step.plan.norms)
