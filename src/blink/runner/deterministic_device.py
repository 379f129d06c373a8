# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernels that give a token the same bits with any other tokens in its step (`--deterministic`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blink.formats.layouts import Layout
from blink.kernels.gpu.attention import invariant as attention
from blink.kernels.gpu.gemm import invariant as gemm
from blink.kernels.matmul import GatedMatmul, Matmul
from blink.models.layers import LayerSpec
from blink.plan.site import Bucket
from blink.runner.gpu_device import GpuDevice
from blink.runner.planner import Option
from blink.runner.sites import ModelSites

ATTENTION = "attention in chunks of one size"


class DeterministicDevice(GpuDevice):
    """Lists them: one for each operation, for all sizes of step. Norms are kernels of their own."""

    matmuls: Mapping[Layout, tuple[Matmul, ...]] = {
        Layout.ROWS: (gemm.MATMUL,),
        Layout.UNITS: (gemm.FP8_MATMUL,),
        Layout.GGUF: (),
    }
    gated: Mapping[Layout, tuple[GatedMatmul, ...]] = {}

    @property
    def styles(self) -> tuple[()]:
        """None."""
        return ()

    @property
    def of_ranks(self) -> GpuDevice:
        """The same: ranks are refused before."""
        return self

    def list_attentions(self, model: ModelSites, layer: LayerSpec, bucket: Bucket) -> Iterable[Option]:  # noqa: ARG002
        """Return the one for a layer's attention."""
        mixer = layer.mixer.attention
        if mixer is None or mixer.latent is not None:
            return (Option(ATTENTION, "a recurrent layer or latent attention"),)
        return (Option(ATTENTION, attention.refuses(mixer.head_dim), lambda: attention.describe(mixer.group)),)
