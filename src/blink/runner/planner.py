# SPDX-License-Identifier: Apache-2.0
"""Chooses the kernel of each operation of a step: of those that do not refuse, the first in the device's order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from blink.errors import ConfigError
from blink.formats.layouts import ExpertMatrices, Layout, Matrix
from blink.kernels.matmul import GatedMatmul, Matmul
from blink.models.layers import LayerSpec
from blink.plan.execution_plan import Choice, ExecutionPlan, LayerPlan, NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.sites import LayerSites, ModelSites


class Refused(Exception):
    """A style of steps that is not taken, with the reason."""


PlanStyle = Callable[[ModelSites, Bucket], StepPlan]


@dataclass(frozen=True, slots=True)
class Option:
    """A kernel that may be chosen."""

    name: str
    refusal: str | None
    describe: Callable[[], str] = str


class Device(Protocol):
    """The kernels of a device, those before others that are faster wherever they can run."""

    @property
    def matmuls(self) -> Mapping[Layout, Sequence[Matmul]]:
        """Those that multiply with a weight, by how it lies."""
        ...

    @property
    def gated(self) -> Mapping[Layout, Sequence[GatedMatmul]]:
        """Those with SiLU in them."""
        ...

    @property
    def styles(self) -> Sequence[tuple[NormStyle, PlanStyle]]:
        """How steps are planned, beside those whose norms are kernels."""
        ...

    @property
    def of_ranks(self) -> Device:
        """The kernels where ranks share layers."""
        ...

    def fit(self, bucket: Bucket) -> Device:
        """Return the kernels for a size of step."""
        ...

    def list_attentions(self, model: ModelSites, layer: LayerSpec, bucket: Bucket) -> Iterable[Option]:
        """List the kernels for a layer's attention."""
        ...

    def list_experts(self, experts: ExpertMatrices, bucket: Bucket) -> Iterable[Option]:
        """List the kernels for a layer's experts."""
        ...


def choose(options: Iterable[Option]) -> Choice:
    """Return the first kernel that does not refuse, with the reasons of those before it."""
    refused: list[str] = []
    for option in options:
        if option.refusal is None:
            return Choice(option.name, option.describe(), refused=tuple(refused))
        refused.append(f"{option.name} ({option.refusal})")
    raise Refused("; ".join(refused))


def choose_matmul(device: Device, matrix: Matrix, rows: int) -> Choice:
    """Return the kernel that multiplies so many rows with a weight."""
    return choose(_list_options(device.matmuls[matrix.layout], matrix, rows))


def choose_gated(device: Device, matrix: Matrix, rows: int, activation: str) -> Choice:
    """Return the kernel of fused gate-up: one with the activation in it, or another before the activation's."""
    gated = device.gated.get(matrix.layout, ()) if activation == "silu" else ()
    return choose(_list_options((*gated, *device.matmuls[matrix.layout]), matrix, rows))


def _list_options(kernels: Iterable[Matmul | GatedMatmul], matrix: Matrix, rows: int) -> Iterator[Option]:
    for kernel in kernels:
        yield Option(kernel.name, kernel.refuses(matrix, rows), functools.partial(kernel.describe, matrix, rows))


def plan_step(device: Device, model: ModelSites, bucket: Bucket, *, whole: bool = True) -> StepPlan:
    """Choose the kernels of a step.

    whole: whether it runs without a pause, and no more is wanted of it than the logits of rows' last tokens.

    Raises:
        ConfigError: an operation has no kernel on the device.
    """
    device, refused = device.fit(bucket), list[str]()
    for style, plan in device.styles:
        if not (whole or bucket.decoding or style.has_all_steps):
            continue
        try:
            found = plan(model, bucket)
        except Refused as reason:
            refused.append(f"{style.value} ({reason})")
        else:
            return replace(found, refused=tuple(refused))
    return _plan_norm_kernels(device, model, bucket, tuple(refused))


def _plan_norm_kernels(device: Device, model: ModelSites, bucket: Bucket, refused: tuple[str, ...]) -> StepPlan:
    if model.spec.shard.size > 1:
        device = device.of_ranks
    try:
        layers = plan_layers(model, lambda layer: _plan_layer(device, model, layer, bucket))
    except Refused as reason:
        raise ConfigError(f"No kernel of this device takes the model: {reason}. Use --device cpu.") from None
    head = choose_matmul(device, model.head, bucket.rows)
    return StepPlan(NormStyle.KERNEL, layers, head, bucket.tokens, refused)


def plan_layers(model: ModelSites, plan: Callable[[LayerSites], LayerPlan]) -> tuple[LayerPlan, ...]:
    """Plan each layer, equal ones once."""
    plans = {layer: plan(layer) for layer in dict.fromkeys(model.layers)}
    return tuple(plans[layer] for layer in model.layers)


def _plan_layer(device: Device, model: ModelSites, layer: LayerSites, bucket: Bucket) -> LayerPlan:
    def multiply(matrix: Matrix | None) -> Choice | None:
        return None if matrix is None else choose_matmul(device, matrix, bucket.tokens)

    gate_up, down = layer.dense or (None, None)
    activation = layer.spec.mlp.activation
    found = LayerPlan(
        qkv=choose_matmul(device, layer.qkv, bucket.tokens),
        gates=multiply(layer.gates),
        query=multiply(layer.query),
        attend=choose(device.list_attentions(model, layer.spec, bucket)),
        output=choose_matmul(device, layer.output, bucket.tokens),
        gate_up=None if gate_up is None else choose_gated(device, gate_up, bucket.tokens, activation),
        down=multiply(down),
        router=multiply(layer.router),
        experts=None if layer.experts is None else choose(device.list_experts(layer.experts, bucket)),
    )
    return found if model.spec.shard.size == 1 else found.share()


def plan_model(device: Device, model: ModelSites, buckets: Iterable[Bucket]) -> ExecutionPlan:
    """Choose the kernels of all sizes of step."""
    return ExecutionPlan({bucket: plan_step(device, model, bucket) for bucket in buckets})
