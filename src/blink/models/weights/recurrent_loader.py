# SPDX-License-Identifier: Apache-2.0
"""Read what the recurrent layers of a model mix tokens with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blink.kernels.delta_rule import DeltaWeights
from blink.kernels.mamba import MambaWeights
from blink.models.cache_layout import CONV_WIDTH
from blink.models.layer_weights import RecurrentWeights
from blink.models.layers import GatedDeltaNet
from blink.models.mamba import Mamba2
from blink.models.weights.checkpoint import Checkpoint
from blink.models.weights.head_order import ungroup
from blink.models.weights.target import WeightTarget
from blink.models.weights.tensor_loader import TensorLoader


@dataclass(frozen=True, slots=True)
class RecurrentLoader:
    """Reads layers of a model, as fields of LayerWeights. Each method raises a ConfigError if a tensor is missing."""

    checkpoint: Checkpoint
    tensors: TensorLoader
    target: WeightTarget
    hidden: int
    eps: float
    has_grouped_projections: bool  # see Family

    def load(self, mixer: GatedDeltaNet | Mamba2, prefix: str) -> dict[str, Any]:
        """Read a layer, whose tensors have a prefix."""
        if mixer.delta_net is not None:
            return self._load_delta_net(mixer.delta_net, prefix)
        assert mixer.mamba is not None
        return self._load_mamba(mixer.mamba, prefix)

    def _load_delta_net(self, mixer: GatedDeltaNet, prefix: str) -> dict[str, Any]:
        heads, order, gates_order = mixer.v_heads, None, None
        parts, gates = (
            {"in_proj_qkv": mixer.channels, "in_proj_z": mixer.out_size},
            {"in_proj_b": heads, "in_proj_a": heads},
        )
        if self.has_grouped_projections and self.checkpoint.keeps_groups:
            parts, gates = {"in_proj_qkvz": mixer.in_size}, {"in_proj_ba": 2 * heads}
            repeats = heads // mixer.k_heads
            values = repeats * mixer.v_dim
            order, gates_order = (
                [torch.cat(ungroup(mixer.k_heads, [mixer.k_dim, mixer.k_dim, values, values]))],
                [torch.cat(ungroup(mixer.k_heads, [repeats] * 2))],
            )
        norm = self.tensors.read(f"{prefix}.norm.weight", mixer.v_dim, dtype=torch.float32)
        sizes = self.eps, mixer.k_heads, mixer.k_dim
        rule = DeltaWeights(self._load_taps(mixer, prefix), *self._load_decay(heads, prefix), norm, *sizes)
        return self._join(mixer, prefix, (parts, order), (gates, gates_order), rule)

    def _load_mamba(self, mixer: Mamba2, prefix: str) -> dict[str, Any]:
        taps = self._load_taps(mixer, prefix)
        bias = self.tensors.read(f"{prefix}.conv1d.bias", mixer.channels) if mixer.conv_bias else None
        rule = MambaWeights(
            taps,
            bias,
            *self._load_decay(mixer.heads, prefix),
            self.tensors.read(f"{prefix}.D", mixer.heads, dtype=torch.float32),
            self.tensors.read(f"{prefix}.norm.weight", mixer.out_size, dtype=torch.float32),
            self.eps,
            mixer.groups,
            mixer.state_size,
        )
        parts = {"in_proj_xbc": mixer.channels, "in_proj_z": mixer.out_size}
        return self._join(mixer, prefix, (parts, None), ({"in_proj_dt": mixer.heads}, None), rule)

    def _load_taps(self, mixer: GatedDeltaNet | Mamba2, prefix: str) -> Tensor:
        """Read the convolution [width, channels]."""
        name = f"{prefix}.conv1d.weight"
        self.checkpoint.check(name, (mixer.channels, 1, CONV_WIDTH))
        taps = self.target.allocate(CONV_WIDTH, mixer.channels)
        self.tensors.fill(name, taps.T[:, None])
        return taps

    def _load_decay(self, heads: int, prefix: str) -> tuple[Tensor, Tensor]:
        """Read the rate of each head's decay, and what is added to its time step."""
        rate, dt_bias = (
            self.tensors.read(f"{prefix}.{name}", heads, dtype=torch.float32) for name in ("A_log", "dt_bias")
        )
        return rate.exp_().neg_(), dt_bias

    def _join(
        self,
        mixer: GatedDeltaNet | Mamba2,
        prefix: str,
        parts: tuple[Mapping[str, int], Sequence[Tensor] | None],
        gates: tuple[Mapping[str, int], Sequence[Tensor] | None],
        rule: DeltaWeights | MambaWeights,
    ) -> dict[str, Any]:
        """Return all of a layer; parts, gates: rows of the projections of both, and which of them to take."""
        projection, gate_projection = (
            self.tensors.load_matrix({f"{prefix}.{name}": rows for name, rows in each.items()}, self.hidden, order)
            for each, order in (parts, gates)
        )
        return {
            "qkv": projection,
            "qkv_bias": None,
            "output": self.tensors.load_matrix({f"{prefix}.out_proj": self.hidden}, mixer.out_size),
            "output_bias": None,
            "head_norm": None,
            "recurrent": RecurrentWeights(gate_projection, rule),
        }
