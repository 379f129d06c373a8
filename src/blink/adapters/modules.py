# SPDX-License-Identifier: Apache-2.0
"""The matrices of a model that adapters may change, by the names that adapters' files call them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from blink.adapters.expert_modules import list_experts
from blink.adapters.module import ALL, Module
from blink.errors import ConfigError
from blink.formats.base import Weight
from blink.formats.experts import find_encoding
from blink.kernels.lora import WeightParts
from blink.models.decoder import Decoder
from blink.models.families import FAMILIES
from blink.models.families.base import Family
from blink.models.layer_weights import DenseWeights, LayerWeights, MoeWeights
from blink.models.layers import LayerSpec
from blink.models.mlps import DenseMlp
from blink.models.spec import ModelSpec
from blink.models.weights.cuts import Cut, Cuts, Whole
from blink.models.weights.decoder_loader import list_projections, order_rows
from blink.models.weights.latent_loader import order_key, order_queries

_NOT_ON_RANKS = "it is served without --tensor-parallel-size only"
_ABSORBED = "latent attention has this matrix in its queries and its results, where adapters do not reach it"


def find_weights(model: Decoder) -> Mapping[int, WeightParts]:
    """Return the weights that adapters may change, by identity.

    Raises:
        ConfigError: the model has none, or pools.
    """
    found: dict[int, WeightParts] = {}
    for module in list_modules(model).values():
        if module.refusal:
            continue
        known = found.get(id(module.weight))
        rows = () if known is None else known.rows
        out, size = module.weight.shape[-2:]
        added = tuple(part for part in module.parts if part not in rows)
        found[id(module.weight)] = WeightParts((out, size), (*rows, *added), module.num_experts)
    if not found or model.spec.pooling is not None:
        raise ConfigError("--enable-lora: adapters of this model are not served yet")
    return found


def list_modules(model: Decoder) -> Mapping[str, Module]:
    """Return the modules that adapters may change, by names such as "layers.0.self_attn.q_proj", and refused ones.

    Those of recurrent layers, embeddings and the output layer are not among them.
    """
    family, find_cut = FAMILIES[model.spec.architecture], _choose_cuts(model.spec)
    refused = _NOT_ON_RANKS if model.spec.whole is not None else ""
    is_gpu = model.device.type == "cuda"
    found: dict[str, Module] = {}
    for index, (spec, weights) in enumerate(zip(model.spec.layers, model.layers, strict=True)):
        for name, module in _list_layer(spec, weights, family, model.spec.hidden_size):
            cut = find_cut(f"model.layers.{index}.{name}.weight")
            found[f"layers.{index}.{family.tensor_names.get(name, name)}"] = replace(module, cut=cut)
        latent = _list_latent(spec, weights, model.spec.hidden_size)
        found |= _place(index, latent, refused)
        experts = list_experts(weights.mlp, family.experts)
        found |= _place(index, experts, refused or (_refuse_experts(weights.mlp) if is_gpu else ""))
    return found


def _choose_cuts(spec: ModelSpec) -> Callable[[str], Cut | Whole]:
    """Return what finds the cuts of a model, or of a rank's part of one, by tensors' names."""
    if spec.whole is None:
        return lambda _: ALL
    return Cuts(spec.whole, spec.shard, spec.whole.scaled_columns).find


def _refuse_experts(mlp: DenseWeights | MoeWeights) -> str:
    """Return why a GPU takes no adapters of a layer's experts; empty: it does."""
    encoding = None if isinstance(mlp, DenseWeights) else find_encoding(mlp.gate_up)
    if encoding is not None and encoding.format.ggml >= 0:
        return "a GPU takes none of experts of GGUF files: use --device cpu"
    return ""


def _place(layer: int, modules: Iterable[tuple[str, Module]], refusal: str) -> dict[str, Module]:
    """Return a layer's modules by their names in the model; refusal: why none of them is served, if none is."""
    return {
        f"layers.{layer}.{name}": replace(module, refusal=refusal) if refusal else module for name, module in modules
    }


def _list_latent(spec: LayerSpec, weights: LayerWeights, hidden: int) -> Iterator[tuple[str, Module]]:
    mixer = spec.mixer.attention
    if mixer is None or mixer.latent is None or weights.latent is None:
        return
    latent, query, expansion = mixer.latent, weights.latent.query, weights.latent.expansion
    queries = order_queries(latent, mixer.heads)
    if query is None:
        parts, order = {"q_proj": len(queries)}, [queries]
    else:
        parts, order = {"q_a_proj": latent.query_rank}, [torch.arange(latent.query_rank)]
        shape = (len(queries), latent.query_rank)
        yield "self_attn.q_b_proj", Module(query, slice(0, len(queries)), shape, queries)
    parts["kv_a_proj_with_mqa"] = latent.kept
    yield from _split("self_attn", weights.qkv, parts, hidden, [*order, order_key(latent)])
    yield "self_attn.o_proj", Module(weights.output, slice(0, hidden), (hidden, mixer.out_size), None)
    rows = mixer.heads * (latent.nope + latent.value)
    yield "self_attn.kv_b_proj", Module(expansion.keys, slice(0, rows), (rows, latent.rank), None, refusal=_ABSORBED)


def _list_layer(spec: LayerSpec, weights: LayerWeights, family: Family, hidden: int) -> Iterator[tuple[str, Module]]:
    mixer = spec.mixer.attention
    if mixer is not None and mixer.latent is None:
        parts = list_projections(mixer)
        order = order_rows(mixer, separates_pairs=family.rotates_pairs)
        if family.is_qkv_fused:
            parts = {"qkv_proj": sum(parts.values())}
        yield from _split("self_attn", weights.qkv, parts, hidden, order)
        yield "self_attn.o_proj", Module(weights.output, slice(0, hidden), (hidden, mixer.q_size), None)
    dense = _find_dense(weights.mlp)
    if dense is not None and spec.mlp.dense is not None:
        yield from _list_dense(_name_dense(weights.mlp, family), dense, spec.mlp.dense, hidden, family)


def _find_dense(mlp: DenseWeights | MoeWeights) -> DenseWeights | None:
    if isinstance(mlp, DenseWeights):
        return mlp
    beside = mlp.shared or mlp.beside
    return None if beside is None else beside.mlp


def _name_dense(mlp: DenseWeights | MoeWeights, family: Family) -> str:
    if isinstance(mlp, DenseWeights) or mlp.shared is None or family.experts is None or not family.experts.shared:
        return "mlp"
    return f"{family.experts.block}.{family.experts.shared}"


def _list_dense(
    block: str, weights: DenseWeights, mlp: DenseMlp, hidden: int, family: Family
) -> Iterator[tuple[str, Module]]:
    parts = {"gate_proj": mlp.size, "up_proj": mlp.size} if mlp.inner_size > mlp.size else {"up_proj": mlp.size}
    if family.is_gate_up_fused:
        parts = {"gate_up_proj": mlp.inner_size}
    yield from _split(block, weights.gate_up, parts, hidden, None)
    yield f"{block}.down_proj", Module(weights.down, slice(0, hidden), (hidden, mlp.size), None)


def _split(
    block: str, weight: Weight, parts: dict[str, int], columns: int, order: list[Tensor] | None
) -> Iterator[tuple[str, Module]]:
    """Return matrices that lie one below the other in a weight."""
    orders = order or [None] * len(parts)
    sizes = [size if rows is None else len(rows) for size, rows in zip(parts.values(), orders, strict=False)]
    starts = itertools.accumulate(sizes, initial=0)
    for (name, size), rows, start, own in zip(parts.items(), orders, starts, sizes, strict=False):
        yield f"{block}.{name}", Module(weight, slice(start, start + own), (size, columns), rows)
