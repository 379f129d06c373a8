# SPDX-License-Identifier: Apache-2.0
"""Step: what all operations of one step share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from blink.kernels.all_reduce import Ranks, mean_of
from blink.kernels.batch import Batch, Header
from blink.kernels.latent import LatentKernels
from blink.kernels.layer_cache import KvCache
from blink.kernels.lora import StepUpdates
from blink.kernels.matmul import GatedMatmul, Matmul
from blink.kernels.router import ChooseKernel, ChooseOfRows
from blink.kernels.shared_expert import AddShared
from blink.models.decoder import Decoder
from blink.models.layer_weights import MoeWeights
from blink.models.spec import ModelSpec
from blink.plan.execution_plan import StepPlan
from blink.plan.site import Bucket
from blink.runner.planner import Device

# Of rows, logits, an MLP's weights, num_tokens, what experts' results are multiplied by if logits do not say it, and
# the step's StepUpdates, as the device has them.
MixtureKernel = Callable[[Tensor, Tensor, MoeWeights, Tensor, "Tensor | None", Any], Tensor]


FindUpdates = Callable[[Batch, Bucket], "StepUpdates | None"]  # of a step's tokens; None: none has any


class MixtureKernels(NamedTuple):
    """A device's kernels of mixtures of experts."""

    mixtures: Mapping[str, MixtureKernel]  # by the names that plans call them
    choose: ChooseKernel  # experts, where their largest logits do not say it
    choose_of_rows: ChooseOfRows  # the same with the router's GEMM
    add_shared: AddShared


@dataclass(frozen=True, slots=True)
class Kernels:
    """A device's kernels: by the names that plans call them, or those that serve all plans."""

    matmuls: Mapping[str, Matmul]
    gated: Mapping[str, GatedMatmul]
    experts: MixtureKernels
    latent: LatentKernels

    @classmethod
    def of(cls, device: Device, experts: MixtureKernels, latent: LatentKernels) -> Kernels:
        """Name a device's kernels."""
        lists = [kernels for one in (device, device.of_ranks) for kernels in one.matmuls.values()]
        matmuls = {kernel.name: kernel for kernels in lists for kernel in kernels}
        of_gated = [kernels for one in (device, device.of_ranks) for kernels in one.gated.values()]
        gated = {kernel.name: kernel for kernels in of_gated for kernel in kernels}
        return cls(matmuls, gated, experts, latent)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a model."""

    model: Decoder
    kernels: Kernels
    plan: StepPlan
    bucket: Bucket
    batch: Batch
    kv_cache: KvCache
    ranks: Ranks
    updates: StepUpdates | None = None  # of tokens that have adapters
    deterministic: bool = False  # whether a token has the same bits in any step

    @property
    def num_tokens(self) -> Tensor:
        """How many tokens are not padding: int32 [1]."""
        return self.batch.header[Header.NUM_TOKENS : Header.NUM_TOKENS + 1]

    def merge_means(self, means: Tensor) -> Tensor:
        """Return the means of what all ranks have equal parts of, from those of this rank's part."""
        return mean_of(self.ranks, means)


def cap_logits(spec: ModelSpec, logits: Tensor) -> Tensor:
    """Divide logits and cap them in place, where a model does."""
    if spec.logits_divisor != 1:
        logits.div_(spec.logits_divisor)
    if spec.logits_softcap:
        logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
    return logits


def take_last_tokens(hidden: Tensor, batch: Batch, num_rows: int) -> Tensor:
    """Return the rows of hidden [tokens, hidden] that belong to each row's last token [num_rows, hidden]."""
    return hidden.index_select(0, (batch.query_starts[1 : num_rows + 1] - 1).clamp_(min=0))
