# SPDX-License-Identifier: Apache-2.0
"""Read what layers have beyond attention and one MLP: an MLP next to experts, inputs of their own, a scale."""

from __future__ import annotations

from dataclasses import replace

import torch

from blink.errors import ConfigError
from blink.formats.experts import find_encoding, multiply_experts
from blink.models.layer_weights import (
    DenseWeights,
    InputWeights,
    LayerEnd,
    LayerInputWeights,
    MlpBeside,
    MoeWeights,
)
from blink.models.layers import LayerSpec
from blink.models.spec import ModelSpec
from blink.models.weights.tensor_loader import TensorLoader


def add_mlp_beside(tensors: TensorLoader, experts: MoeWeights, mlp: DenseWeights, layer: str) -> MoeWeights:
    """Return experts with the MLP beside them; layer: how names begin.

    What each expert's result is multiplied by becomes part of its matrix, or of the scales of that.

    Raises:
        ConfigError: the experts are those of a GGUF file.
    """
    if find_encoding(experts.down) is None:
        raise ConfigError(f"'{layer}.experts' are of a GGUF file, which is not supported; use another model.")
    count, hidden = experts.router.shape
    scales = tensors.read(f"{layer}.router.per_expert_scale", count, dtype=torch.float32)
    multiply_experts(experts.down, scales[experts.first : experts.first + experts.spec.own_experts])
    router_norm = tensors.read(f"{layer}.router.scale", hidden, dtype=torch.float32).mul_(hidden**-0.5)
    end, before, after = (
        tensors.read(f"{layer}.{name}.weight", hidden)
        for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    )
    return replace(experts, beside=MlpBeside(mlp, end, before, after, router_norm))


def load_end(tensors: TensorLoader, spec: LayerSpec, hidden: int, layer: str) -> LayerEnd:
    """Read what happens behind a layer's MLP."""
    scale, size = tensors.read(f"{layer}.layer_scalar", 1), spec.input_size
    if not size:
        return LayerEnd(None, scale)
    gate = tensors.load_matrix({f"{layer}.per_layer_input_gate": size}, hidden)
    projection = tensors.load_matrix({f"{layer}.per_layer_projection": hidden}, size)
    norm = tensors.read(f"{layer}.post_per_layer_input_norm.weight", hidden)
    return LayerEnd(InputWeights(gate, projection, norm), scale)


def load_layer_inputs(
    tensors: TensorLoader, spec: ModelSpec, table_device: torch.device | None
) -> LayerInputWeights | None:
    """Read what makes the inputs that layers have of their own; table_device: where their table is to lie."""
    if spec.layer_inputs is None:
        return None
    rows, size = spec.layer_inputs.rows, spec.layer_inputs.size
    columns = spec.num_layers * size
    table = tensors.read("model.embed_tokens_per_layer.weight", rows, columns, device=table_device)
    projection = tensors.load_matrix({"model.per_layer_model_projection": columns}, spec.hidden_size)
    return LayerInputWeights(table, projection, tensors.read("model.per_layer_projection_norm.weight", size))
