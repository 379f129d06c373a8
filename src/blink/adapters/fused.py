# SPDX-License-Identifier: Apache-2.0
"""Updates of parameters that have a matrix of each expert, as PEFT's `target_parameters` makes them.

Of E experts and rank r, lora_A is [E * r, in] by expert, and lora_B is [out, r * E] by rank: lora.ParamWrapper of PEFT
from 0.17 on. Up to 0.19.0 it took `in` and `out` of parameters [E, out, in] for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.adapters.expert_modules import DOWN, GATE_UP
from blink.adapters.module import Module
from blink.adapters.peft_config import AdapterConfig

_BLOCK, _INNER = ".experts", ".base_layer"
_LAST_SWAPPED = (0, 19, 0)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of lora_A and lora_B."""

    down: tuple[int, int]
    up: tuple[int, int]


def name_parameter(module: str, config: AdapterConfig) -> str:
    """Return the parameter that a tensor belongs to, whose name says no more than "layers.0.mlp.experts"; or `module`.

    Of two parameters PEFT wraps the first of the model inside of the second.
    """
    if module.endswith(_BLOCK + _INNER):
        return f"{module.removesuffix(_INNER)}.{GATE_UP}"
    if not module.endswith(_BLOCK):
        return module
    names = (f"{module}.{DOWN}", f"{module}.{GATE_UP}")
    return next((name for name in names if any(is_end(name, target) for target in config.parameters)), module)


def is_end(module: str, target: str) -> bool:
    """Say whether a module's name ends as a target's."""
    return f".{module}".endswith(f".{target}")


def list_shapes(module: Module, rank: int) -> dict[bool, Shapes]:
    """Return the shapes of a fused module's tensors: True for those of matrices as they are, False for swapped ones."""
    (out, size), count = module.shape, module.num_experts
    return {
        True: Shapes((count * rank, size), (out, rank * count)),
        False: Shapes((count * rank, out), (size, rank * count)),
    }


def is_straight(module: Module, config: AdapterConfig) -> bool | None:
    """Say whether tensors that have either shape are those of matrices as they are; None: nothing says it."""
    assert module.fused is not None
    if config.version is None or module.fused.orientation == "unknown":
        return None
    if config.version > _LAST_SWAPPED:
        return True
    return module.fused.orientation == "columns" and config.version < _LAST_SWAPPED


def split(module: Module, down: Tensor, up: Tensor, *, straight: bool) -> tuple[Tensor, Tensor]:
    """Return the two matrices of each expert's update: [experts, rank, in] and [experts, out, rank]."""
    by_expert = down.unflatten(0, (module.num_experts, -1))
    by_rank = up.unflatten(1, (-1, module.num_experts))
    if straight:
        return by_expert, by_rank.permute(2, 0, 1)
    return by_rank.permute(2, 1, 0), by_expert.transpose(1, 2)
