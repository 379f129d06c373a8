# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernels, and the two styles of steps of few rows, whose kernels compute norms with their GEMMs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

from blink.formats.layouts import ExpertMatrices, Layout, Matrix
from blink.formats.schemes import FP8_ROW, INT4
from blink.kernels.gpu.attention import decode as attention
from blink.kernels.gpu.attention import heads
from blink.kernels.gpu.attention import plan as attention_plan
from blink.kernels.gpu.device import has_clusters
from blink.kernels.gpu.gemm import bf16, few_rows, fused_gate_up, gemv, gguf_weight, measured, prefill_int4, quantized
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm.tile_configs import Output, bucket_rows
from blink.kernels.gpu.latent import expanded as expanded_latents
from blink.kernels.gpu.latent import plan as latent_plan
from blink.kernels.gpu.latent import sizes as latent_sizes
from blink.kernels.gpu.moe import decode as moe
from blink.kernels.gpu.moe import grouped_gemm
from blink.kernels.matmul import GatedMatmul, Matmul
from blink.kernels.operands import ExpandedSizes, LatentSizes
from blink.models.layers import Attention, LayerSpec
from blink.plan.execution_plan import Choice, LayerPlan, NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.gpu_recurrences import list_recurrences
from blink.runner.planner import Device, Option, Refused, choose, choose_matmul, plan_layers
from blink.runner.sites import LayerSites, ModelSites
from blink.runner.updated_device import fit_updates

DECODE_ATTENTION, PAGED_ATTENTION = "decode attention", "paged attention"
LATENT_ATTENTION = "latent attention"
STREAMED, PERMUTED, GATHERED = "experts streamed", "experts of copied rows", "experts of gathered rows"

# What is faster with so many rows: see benchmarks/kernels/decode_layer.py.
MAX_GEMV_ROWS = 2
MAX_INT4_GEMV_ROWS = 4  # of dense layers with 4 bits throughout
MAX_INT4_ROWS_BEFORE_HI_LO = 2  # of such
MAX_MIXED_TOKENS = 80  # of steps with prompts: of more, cuBLAS and kernels of their own are as fast
MAX_PACKED_ROWS_WITH_EXPERTS = 64  # not measured above
MAX_STREAMED_ROWS = 8  # with experts: see benchmarks/kernels/few_experts.py
MAX_STREAMED_PACKED_ROWS = 2  # in blocks or 4 bits
MAX_STREAMED_FP8_ROWS = 1  # with a scale for each row


_MANY_ROWS: Mapping[Layout, tuple[Matmul, ...]] = {
    Layout.ROWS: (bf16.CUBLAS,),
    Layout.UNITS: (
        quantized.FEW_ROWS,
        prefill_int4.INT4_PREFILL,
        quantized.FP8_ROWS,
        quantized.FP8_BLOCKS,
        quantized.DEQUANTIZED,
    ),
    Layout.GGUF: (gguf_weight.GGUF, gguf_weight.GGUF_DEQUANTIZED),
}
_MANY_ROWS_GATED: Mapping[Layout, tuple[GatedMatmul, ...]] = {
    Layout.ROWS: (fused_gate_up.GATED,),
    Layout.UNITS: (prefill_int4.GATED_INT4_PREFILL,),
}


class GpuDevice:
    """Lists them."""

    matmuls: Mapping[Layout, tuple[Matmul, ...]] = {
        Layout.ROWS: (measured.measure(bf16.CUBLAS, (few_rows.GEMV, few_rows.GEMM)), *_MANY_ROWS[Layout.ROWS]),
        Layout.UNITS: (measured.measure(quantized.FEW_ROWS, (few_rows.GEMV,)), *_MANY_ROWS[Layout.UNITS]),
        Layout.GGUF: _MANY_ROWS[Layout.GGUF],
    }
    gated: Mapping[Layout, tuple[GatedMatmul, ...]] = {
        layout: (measured.measure_gated(first, (few_rows.GATED_GEMV, few_rows.GATED_GEMM)), *_MANY_ROWS_GATED[layout])
        for layout, first in ((Layout.ROWS, bf16.CUBLAS), (Layout.UNITS, quantized.FEW_ROWS))
    }

    @property
    def styles(self) -> tuple[tuple[NormStyle, Callable[[ModelSites, Bucket], StepPlan]], ...]:
        """The styles of steps of few rows."""
        return (NormStyle.READER, plan_readers), (NormStyle.WRITER, plan_writers)

    @property
    def of_ranks(self) -> GpuDevice:
        """Those of ranks that share layers."""
        return RankDevice()

    def fit(self, bucket: Bucket) -> Device:
        """Return those for a size of step."""
        return fit_updates(self, bucket, (plan_writers, functools.partial(plan_writers, gate_up=Output.STORE)))

    def list_attentions(self, model: ModelSites, layer: LayerSpec, bucket: Bucket) -> Iterable[Option]:
        """List the kernels for a layer's attention, or for its recurrent rule."""
        recurrence = layer.mixer.recurrence
        if recurrence is not None:
            yield from list_recurrences(recurrence, model.dtype, bucket)
            return
        if layer.mixer.attention is not None and layer.mixer.attention.latent is not None:
            yield from _offer_latent_attention(model, layer.mixer.attention, bucket)
            return
        if bucket.decoding:
            yield _offer_decode_attention(model, layer.mixer.attention, bucket.rows)
        mixer, dtypes = layer.mixer.attention, (model.dtype, model.kv_dtype)
        assert mixer is not None
        attentions = [one for one in model.spec.attentions if one.shape == mixer.shape]
        yield Option(
            PAGED_ATTENTION,
            heads.refuses(mixer.head_dim),
            lambda: attention_plan.describe(attentions, model.block_size, dtypes, bucket),
        )

    def list_experts(self, experts: ExpertMatrices, bucket: Bucket) -> Iterable[Option]:
        """List the kernels for a layer's experts, whose input is a norm."""
        rows = bucket.tokens
        if bucket.decoding:
            others = "another activation, biases, or some of the experts"
            refusal = grouped_gemm.refuses(experts, rows) if experts.is_plain else others
            yield Option(PERMUTED, refusal, lambda: grouped_gemm.describe(experts, rows))
        yield Option(GATHERED, None)


class RankDevice(GpuDevice):
    """Lists those of ranks that share layers: an all-reduce adds up what GEMMs compute, and has the norm."""

    matmuls: Mapping[Layout, tuple[Matmul, ...]] = {
        Layout.ROWS: (few_rows.RANK_GEMV, few_rows.GEMM, *_MANY_ROWS[Layout.ROWS]),
        Layout.UNITS: (few_rows.RANK_GEMV, *_MANY_ROWS[Layout.UNITS]),
        Layout.GGUF: _MANY_ROWS[Layout.GGUF],
    }
    gated: Mapping[Layout, tuple[GatedMatmul, ...]] = {
        layout: (few_rows.GATED_RANK_GEMV, few_rows.GATED_GEMM, *kernels)
        for layout, kernels in _MANY_ROWS_GATED.items()
    }


def _offer_decode_attention(model: ModelSites, mixer: Attention | None, rows: int) -> Option:
    if mixer is None:
        return Option(DECODE_ATTENTION, "a recurrent layer")
    refusal = attention.refuses(mixer, model.block_size, model.dtype) if has_clusters() else "no Hopper"
    return Option(DECODE_ATTENTION, refusal, lambda: attention.describe(mixer, rows))


def _offer_latent_attention(model: ModelSites, mixer: Attention, bucket: Bucket) -> Iterable[Option]:
    latent = mixer.latent
    assert latent is not None
    sizes = ExpandedSizes(LatentSizes(mixer.heads, latent.rank, latent.rope), latent.nope, latent.value)
    shown = model.block_size, (model.dtype, model.kv_dtype), bucket
    refusal = latent_sizes.refuses(latent.rank, latent.rope)
    if not bucket.decoding:
        refused = refusal or expanded_latents.refuses(sizes, bucket)
        yield Option(expanded_latents.EXPANDED, refused, lambda: expanded_latents.describe(sizes, *shown))
    yield Option(LATENT_ATTENTION, refusal, lambda: latent_plan.describe(sizes.latents, *shown))


def _require(reason: str | None) -> None:
    if reason is not None:
        raise Refused(reason)


def refuse_options(model: ModelSites, *known: str) -> None:
    """Refuse models that do more than the kernels of few rows know; known: options of MLPs that they do know."""
    spec = model.spec
    if spec.shard.size > 1:
        raise Refused("ranks that share layers")
    if options := spec.options_beyond("tie_embeddings", "quantization", "drafter", "spare_blocks", "rollback"):
        raise Refused(options[0])
    if any(matrix.layout is Layout.GGUF for matrix in (model.embedding, model.head, *_list_matrices(model))):
        raise Refused("matrices of a GGUF file")
    for layer in spec.distinct_layers:
        options = layer.options_beyond() + layer.mlp.options_beyond(*known)
        if layer.mlp.mixture is not None:
            options += layer.mlp.mixture.router.options_beyond("renormalize")
        if options:
            raise Refused(options[0])


def _require_decode_attention(model: ModelSites) -> None:
    """Refuse models with a layer whose attention is another."""
    for layer in model.spec.distinct_layers:
        _require(_offer_decode_attention(model, layer.mixer.attention, 1).refusal)


def _is_recurrent(model: ModelSites) -> bool:
    return any(layer.mixer.recurrence is not None for layer in model.spec.distinct_layers)


def _refuse_recurrent(model: ModelSites) -> None:
    """Refuse models with recurrent layers whose GEMVs would not read norms in float32."""
    _require(None if has_clusters() else "no Hopper")
    recurrences = (layer.mixer.recurrence for layer in model.spec.distinct_layers)
    if any(one is not None and one.mamba is not None for one in recurrences):
        raise Refused("a Mamba-2 layer")
    if any(matrix.encoding == INT4 for matrix in _list_matrices(model)):
        raise Refused("4 bits beside recurrent layers")


def _list_matrices(model: ModelSites) -> Iterable[Matrix]:
    return (matrix for layer in model.layers for matrix in layer.matrices)


def plan_readers(model: ModelSites, bucket: Bucket) -> StepPlan:
    """Plan a step of GEMVs, each of which computes the norm of its input.

    Raises:
        Refused: another style is faster, or takes what this does not.
    """
    rows = bucket.rows
    if not bucket.decoding:
        raise Refused("prompts")
    refuse_options(model, "shared_size")
    if _is_recurrent(model):
        _refuse_recurrent(model)
    else:
        _require_decode_attention(model)
    most = _most_gemv_rows(model, rows)
    if rows > most:
        raise Refused(f"with more than {most} rows GEMMs are faster")
    layers = plan_layers(model, lambda layer: _plan_reading_layer(model, layer, rows))
    return StepPlan(NormStyle.READER, layers, _choose_gemv(model.head, rows), rows)


def _most_gemv_rows(model: ModelSites, rows: int) -> int:
    """Return up to how many rows GEMVs are the fastest."""
    if _is_recurrent(model) or _has_shared_expert(model):
        return MAX_GEMV_ROWS  # the other style takes none
    are_int4 = all(
        layer.dense is not None and all(matrix.is_packed and matrix.encoding == INT4 for matrix in layer.matrices)
        for layer in model.layers
    )
    if all(gemm.refuses(matrix, rows) is None and gemm.order_for(matrix, rows) for matrix in _list_matrices(model)):
        return MAX_INT4_ROWS_BEFORE_HI_LO if are_int4 else 0
    return MAX_INT4_GEMV_ROWS if are_int4 else MAX_GEMV_ROWS


def _has_shared_expert(model: ModelSites) -> bool:
    return model.spec.mixture is not None and model.spec.mixture.shared_size > 0


def _plan_reading_layer(model: ModelSites, layer: LayerSites, rows: int) -> LayerPlan:
    gate_up, down = layer.dense or (None, None)
    return LayerPlan(
        qkv=_choose_gemv(layer.qkv, rows),
        gates=None if layer.gates is None else _choose_gemv(layer.gates, rows),
        attend=choose(GpuDevice().list_attentions(model, layer.spec, Bucket(rows, rows, decoding=True))),
        output=_choose_gemv(layer.output, rows),
        gate_up=None if gate_up is None else _choose_gemv(gate_up, rows),
        down=None if down is None else _choose_gemv(down, rows),
        router=None if layer.router is None else _choose_gemv(layer.router, rows),
        experts=None if layer.experts is None else choose((_offer_streamed(layer.experts, rows),)),
    )


def _choose_gemv(matrix: Matrix, rows: int) -> Choice:
    _require(gemv.refuses(matrix, rows))
    return Choice(*gemv.describe(matrix, rows))


def _offer_streamed(experts: ExpertMatrices, rows: int) -> Option:
    most = MAX_STREAMED_ROWS
    if experts.encoding is not None and experts.encoding.grouped:
        most = MAX_STREAMED_PACKED_ROWS
    elif experts.encoding == FP8_ROW and grouped_gemm.refuses(experts, rows) is None:
        most = MAX_STREAMED_FP8_ROWS
    refusal = f"with more than {most} rows others are faster" if rows > most else moe.refuses(experts, rows)
    return Option(STREAMED, refusal, lambda: moe.describe(experts, rows))


def plan_writers(model: ModelSites, bucket: Bucket, *, gate_up: Output = Output.GATE) -> StepPlan:
    """Plan a step of GEMMs, in which who writes the residual prepares the norm of it.

    gate_up: what the GEMM of a dense MLP's gate and up writes.

    Raises:
        Refused: another style is faster, or takes what this does not.
    """
    rows, has_experts = bucket.tokens, model.spec.mixture is not None
    if rows > gemm.MAX_ROWS:
        raise Refused(f"more than {gemm.MAX_ROWS} rows")
    if not bucket.decoding:
        _refuse_prompts(model, rows)
    if has_experts and model.packed and rows > MAX_PACKED_ROWS_WITH_EXPERTS:
        raise Refused(f"not measured above {MAX_PACKED_ROWS_WITH_EXPERTS} rows with packed matrices and experts")
    refuse_options(model)
    _require_decode_attention(model)
    # All GEMMs of a step pad alike: what one writes the next reads.
    padded = bucket_rows(rows, plain=not model.packed and not has_experts)
    layers = plan_layers(model, lambda layer: _plan_writing_layer(model, layer, bucket, padded, gate_up))
    if bucket.decoding:
        head = _choose_gemm(model.head, Output.STORE, rows, padded)
    else:
        head = choose_matmul(GpuDevice(), model.head, bucket.rows)
    return StepPlan(NormStyle.WRITER, layers, head, padded)


def _refuse_prompts(model: ModelSites, tokens: int) -> None:
    if tokens > MAX_MIXED_TOKENS:
        raise Refused(f"more than {MAX_MIXED_TOKENS} tokens with prompts")
    if model.spec.mixture is not None or any(matrix.is_packed for matrix in _list_matrices(model)):
        raise Refused("prompts with experts or packed matrices")


def _plan_writing_layer(
    model: ModelSites, layer: LayerSites, bucket: Bucket, padded: int, written: Output
) -> LayerPlan:
    rows = bucket.tokens
    attentions = GpuDevice().list_attentions(model, layer.spec, bucket)
    shared = {
        "qkv": _choose_gemm(layer.qkv, Output.STORE, rows, padded),
        "attend": choose(attentions),
        "output": _choose_gemm(layer.output, Output.ADD, rows, padded),
    }
    if layer.dense is not None:
        gate_up, down = layer.dense
        return LayerPlan(
            **shared,
            gate_up=_choose_gemm(gate_up, written, rows, padded),
            down=_choose_gemm(down, Output.ADD, rows, padded),
        )
    assert layer.router is not None and layer.experts is not None
    experts = choose(_list_grouped(layer.experts, rows))
    return LayerPlan(**shared, router=_choose_gemm(layer.router, Output.STORE, rows, padded), experts=experts)


def _list_grouped(experts: ExpertMatrices, rows: int) -> Iterable[Option]:
    yield _offer_streamed(experts, rows)
    yield Option(PERMUTED, grouped_gemm.refuses(experts, rows), lambda: grouped_gemm.describe(experts, rows))
    yield Option(GATHERED, None)


def _choose_gemm(matrix: Matrix, output: Output, rows: int, padded: int) -> Choice:
    _require(gemm.refuses(matrix, rows))
    return Choice(*gemm.describe(matrix, output, padded), reads=gemm.order_for(matrix, rows))
