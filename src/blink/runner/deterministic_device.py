# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernels that give a token the same bits with any other tokens in its step (`--deterministic`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from blink.formats.layouts import Layout, Matrix
from blink.formats.schemes import FormatId
from blink.kernels.gpu.attention import decode as decode_attention
from blink.kernels.gpu.attention import invariant as attention
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.gemm import in_tiles, invariant, ordered
from blink.kernels.gpu.gemm.tile_configs import Output
from blink.kernels.matmul import GatedMatmul, Matmul
from blink.models.layers import LayerSpec
from blink.plan.execution_plan import Choice, LayerPlan, NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.gpu_device import GpuDevice, refuse_options
from blink.runner.planner import Option, Refused, choose, choose_matmul, plan_layers
from blink.runner.sites import LayerSites, ModelSites

ATTENTION = "attention in chunks of one size"
ORDERED_ATTENTION = "decode attention of one order"


class DeterministicDevice(GpuDevice):
    """Lists them: one for each operation, for all sizes of step. Only the number of its tiles follows a step's size."""

    matmuls: Mapping[Layout, tuple[Matmul, ...]] = {
        Layout.ROWS: (ordered.MATMUL, invariant.MATMUL),
        Layout.UNITS: (ordered.MATMUL, invariant.FP8_MATMUL),
        Layout.GGUF: (),
    }
    gated: Mapping[Layout, tuple[GatedMatmul, ...]] = {}

    @property
    def styles(self) -> tuple[tuple[NormStyle, Callable[[ModelSites, Bucket], StepPlan]], ...]:
        """The style of all steps, but of models that it refuses."""
        return ((NormStyle.ORDERED, plan_ordered),)

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


def plan_ordered(model: ModelSites, bucket: Bucket) -> StepPlan:
    """Plan a step by the kernels of decoding, in which who writes the residual prepares the norm of it.

    Raises:
        Refused: the model, whatever the size of step.
    """
    refuse_options(model)
    if model.spec.mixture is not None:
        raise Refused("mixtures of experts")
    padded = in_tiles.pad(bucket.tokens, packed=model.packed)
    layers = plan_layers(model, lambda layer: _plan_layer(model, layer, padded))
    head = choose_matmul(DeterministicDevice(), model.head, bucket.rows)
    return StepPlan(NormStyle.ORDERED, layers, head, padded)


def _plan_layer(model: ModelSites, layer: LayerSites, padded: int) -> LayerPlan:
    assert layer.dense is not None
    gate_up, down = layer.dense
    return LayerPlan(
        qkv=_choose_gemm(layer.qkv, Output.STORE, padded),
        attend=choose((_offer_attention(model, layer.spec),)),
        output=_choose_gemm(layer.output, Output.ADD, padded),
        gate_up=_choose_gemm(gate_up, Output.GATE, padded),
        down=_choose_gemm(down, Output.ADD, padded),
    )


def _offer_attention(model: ModelSites, layer: LayerSpec) -> Option:
    mixer = layer.mixer.attention
    if mixer is None:
        return Option(ORDERED_ATTENTION, "a recurrent layer")
    refusal = decode_attention.refuses(mixer, model.block_size, model.dtype) if has_clusters() else "no Hopper"
    return Option(ORDERED_ATTENTION, refusal, lambda: decode_attention.describe_ordered(mixer))


def _choose_gemm(matrix: Matrix, output: Output, padded: int) -> Choice:
    refusal = in_tiles.refuses(matrix, output)
    if refusal is not None:
        raise Refused(refusal)
    reads = FormatId.FP8 if matrix.is_packed else None
    return Choice(ordered.NAME, in_tiles.describe(matrix, output, padded), reads=reads)
