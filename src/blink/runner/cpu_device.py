# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels, of which each operation has one."""

from __future__ import annotations

from collections.abc import Iterable

from blink.formats.layouts import ExpertMatrices
from blink.kernels import linear
from blink.models.layers import LayerSpec
from blink.plan.site import Bucket
from blink.runner.planner import Option
from blink.runner.sites import ModelSites

EXPERTS = "one expert after the other"


class CpuDevice:
    """Lists them."""

    matmuls = linear.MATMULS
    gated = {}  # noqa: RUF012 - there are none
    styles = ()

    @property
    def of_ranks(self) -> CpuDevice:
        """The same."""
        return self

    def fit(self, bucket: Bucket) -> CpuDevice:  # noqa: ARG002
        """Return the same."""
        return self

    def list_attentions(self, model: ModelSites, layer: LayerSpec, bucket: Bucket) -> Iterable[Option]:  # noqa: ARG002
        """Return the one for a layer's attention, or its recurrent rule."""
        recurrence, attention = layer.mixer.recurrence, layer.mixer.attention
        if attention is not None:
            return (Option("attention" if attention.latent is None else "latent attention", None),)
        assert recurrence is not None
        return (Option(recurrence.rule, None),)

    def list_experts(self, experts: ExpertMatrices, bucket: Bucket) -> Iterable[Option]:  # noqa: ARG002
        """Return the one for a layer's experts."""
        return (Option(EXPERTS, None),)
