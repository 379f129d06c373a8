# SPDX-License-Identifier: Apache-2.0
"""The matrices of a model that adapters may change, by the names that adapters' files call them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import Weight
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

_ALL = Whole()


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix of a checkpoint, or a rank's part of it: some rows of a weight."""

    weight: Weight
    rows: slice  # of the weight
    shape: tuple[int, int]  # out and in, of the part
    order: Tensor | None  # which of the part's rows are the weight's; None: all, as they are
    cut: Cut | Whole = _ALL  # what the part is of the file's matrix

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Out and in, as files have them."""
        return self.cut.widen(self.shape)

    def take(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part's A [rank, in] and B [rows, rank] of a file's."""
        if isinstance(self.cut, Cut):
            down, up = (down, self.cut.take(up)) if self.cut.dim == 0 else (self.cut.take(down), up)
        return down, up if self.order is None else up[self.order]


def find_weights(model: Decoder) -> Mapping[int, WeightParts]:
    """Return the weights that adapters may change, by identity.

    Raises:
        ConfigError: the model has none, or pools.
    """
    found: dict[int, WeightParts] = {}
    for module in list_modules(model).values():
        known = found.get(id(module.weight))
        rows = (*(() if known is None else known.rows), module.rows)
        found[id(module.weight)] = WeightParts((module.weight.shape[0], module.weight.shape[1]), rows)
    if not found or model.spec.pooling is not None:
        raise ConfigError("--enable-lora: adapters of this model are not served yet")
    return found


def list_modules(model: Decoder) -> Mapping[str, Module]:
    """Return the modules that adapters may change, by names such as "layers.0.self_attn.q_proj".

    Those of experts, latent attention, recurrent layers, embeddings and the output layer are not among them.
    """
    family, find_cut = FAMILIES[model.spec.architecture], _choose_cuts(model.spec)
    found: dict[str, Module] = {}
    for index, (spec, weights) in enumerate(zip(model.spec.layers, model.layers, strict=True)):
        for name, module in _list_layer(spec, weights, family, model.spec.hidden_size):
            cut = find_cut(f"model.layers.{index}.{name}.weight")
            found[f"layers.{index}.{family.tensor_names.get(name, name)}"] = replace(module, cut=cut)
    return found


def _choose_cuts(spec: ModelSpec) -> Callable[[str], Cut | Whole]:
    """Return what finds the cuts of a model, or of a rank's part of one, by tensors' names."""
    if spec.whole is None:
        return lambda _: _ALL
    return Cuts(spec.whole, spec.shard, spec.whole.scaled_columns).find


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
