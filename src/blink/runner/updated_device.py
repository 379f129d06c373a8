# SPDX-License-Identifier: Apache-2.0
"""A GPU's kernels for steps whose rows may have adapters (LoRA): what their updates leave of the device's."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from blink.formats.layouts import ExpertMatrices, Layout
from blink.kernels.gpu.lora import fused
from blink.kernels.matmul import GatedMatmul
from blink.models.layers import LayerSpec
from blink.plan.execution_plan import NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.planner import Device, Option, PlanStyle, Refused
from blink.runner.sites import ModelSites


def fit_updates(device: Device, bucket: Bucket, writers: tuple[PlanStyle, PlanStyle]) -> Device:
    """Return the kernels of a device for a size of step.

    writers: plan a step with activations in GEMMs, which then add updates, and one without.
    """
    return UpdatedDevice(device, writers) if bucket.adapters else device


class UpdatedDevice:
    """Lists those of a device that leave room for updates, which come before an activation."""

    gated: Mapping[Layout, tuple[GatedMatmul, ...]] = {}

    def __init__(self, device: Device, writers: tuple[PlanStyle, PlanStyle]) -> None:
        self._device, self._writers = device, writers
        self.matmuls = device.matmuls
        self.styles = (
            (NormStyle.READER, _refuse_readers),
            (NormStyle.UPDATED, functools.partial(_plan_fused, writers[0])),
            (NormStyle.WRITER, functools.partial(_plan_writers, writers[1])),
        )

    @property
    def of_ranks(self) -> Device:
        """Those of ranks that share layers."""
        return UpdatedDevice(self._device.of_ranks, self._writers)

    def fit(self, bucket: Bucket) -> Device:  # noqa: ARG002
        """Return the same, which are of the size."""
        return self

    def list_attentions(self, model: ModelSites, layer: LayerSpec, bucket: Bucket) -> Iterable[Option]:
        """List the device's."""
        return self._device.list_attentions(model, layer, bucket)

    def list_experts(self, experts: ExpertMatrices, bucket: Bucket) -> Iterable[Option]:
        """List those of the device that take prompts, too: experts may have updates."""
        return self._device.list_experts(experts, replace(bucket, decoding=False))


def _plan_fused(plan: PlanStyle, model: ModelSites, bucket: Bucket) -> StepPlan:
    matrices = dict.fromkeys(matrix for layer in model.layers for matrix in layer.matrices)
    reason = next(filter(None, (fused.refuses(matrix, bucket.tokens) for matrix in matrices)), None)
    if reason is not None:
        raise Refused(reason)
    return replace(_plan_writers(plan, model, bucket), norms=NormStyle.UPDATED)


def _plan_writers(plan: PlanStyle, model: ModelSites, bucket: Bucket) -> StepPlan:
    matrices = (matrix for layer in model.layers for matrix in layer.matrices)
    if model.spec.mixture is not None or any(matrix.is_packed for matrix in matrices):
        raise Refused("adapters with experts or packed matrices")
    return plan(model, bucket)


def _refuse_readers(model: ModelSites, bucket: Bucket) -> StepPlan:  # noqa: ARG001
    raise Refused("adapters: their kernels read a norm that another has written")
