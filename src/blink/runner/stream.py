# SPDX-License-Identifier: Apache-2.0
"""Stream: a step's residual between two operations, and who computes the norms of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from blink.formats.base import Weight
from blink.formats.schemes import FormatId
from blink.kernels.operands import Norm
from blink.models.layer_weights import DenseWeights, LayerEnd, MoeWeights
from blink.plan.execution_plan import Choice, LayerPlan


@dataclass(frozen=True, slots=True)
class Then:
    """What happens to what an operation adds to the residual, and who reads the residual next."""

    end_norm: Norm | None  # of what is added
    scale: float  # of what is added
    next_norm: Norm | None  # of the residual
    next_reads: FormatId | None  # what its reader's activations are: Choice.reads


class Stream(ABC):
    """The residual [tokens, hidden], to which attention and MLP add in turns."""

    residual: Tensor

    @abstractmethod
    def project(self, norm: Norm | None, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:
        """Return the norm of the residual times a weight."""

    def project_again(self, weight: Weight, choice: Choice | None) -> Tensor:
        """Return what project() multiplied last times another weight.

        Raises:
            NotImplementedError: the planner has refused this kind of steps for a layer that needs it.
        """
        raise NotImplementedError

    @abstractmethod
    def add(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice, then: Then) -> None:
        """Add x times a weight to the residual."""

    @abstractmethod
    def add_dense(self, mlp: DenseWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:
        """Add a gated MLP of the norm of the residual."""

    @abstractmethod
    def add_experts(self, mlp: MoeWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:
        """Add a mixture of experts of the norm of the residual."""

    def end_layer(self, end: LayerEnd, inputs: Tensor | None) -> None:
        """Change the residual behind a layer; inputs: the layer's own [tokens, input_size].

        Raises:
            NotImplementedError: the planner has refused this kind of steps for a layer that needs it.
        """
        raise NotImplementedError

    def read(self, norm: Norm | None) -> Tensor:
        """Return the norm of the residual [tokens, hidden].

        Raises:
            NotImplementedError: no steps of this kind tell what the head reads of every token.
        """
        raise NotImplementedError

    def put(self, update: Tensor) -> None:
        """Add an update [tokens, hidden] to the residual.

        Raises:
            NotImplementedError: no layers of this kind of steps run in one call.
        """
        raise NotImplementedError

    def look(self) -> Tensor:
        """Return the residual with all that was added, of which nothing changes."""
        return self.residual

    @abstractmethod
    def compute_logits(self, weight: Weight, choice: Choice) -> Tensor:
        """Return the logits [rows, vocab] of each row's last token."""

    @abstractmethod
    def pause(self) -> Stream | None:
        """Return what a step keeps between two of its segments beside the residual that it was begun with."""


RunLayers = Callable[[Stream], None]  # adds what some layers of a step compute to its residual
