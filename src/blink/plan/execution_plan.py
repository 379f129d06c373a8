# SPDX-License-Identifier: Apache-2.0
"""ExecutionPlan: which kernel each operation of each layer takes, per size of step. Made at boot, printed by `blink
doctor MODEL --plan`, and executed without a question."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from blink.formats.schemes import FormatId
from blink.plan.site import Bucket, Epilogue


class NormStyle(Enum):
    """Who computes the norms of a step."""

    READER = "each GEMV computes the norm of its input"
    WRITER = "the kernel that writes the residual prepares the norm of it"
    UPDATED = "the kernel that writes the residual prepares the norm of it, and GEMMs add low-rank updates"
    KERNEL = "norms are kernels of their own"
    ORDERED = "the kernel that writes the residual prepares the norm of it, in one order for all steps"

    @property
    def has_all_steps(self) -> bool:
        """Whether those are of the style that pause with prompts, or tell what the head reads of every token."""
        return self in (NormStyle.KERNEL, NormStyle.ORDERED)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of an operation."""

    kernel: str
    config: str = ""  # of its tiles, in words
    # Its activations are hi/lo FP8 in the order of these weights; None: in their own type.
    reads: FormatId | None = None
    refused: tuple[str, ...] = field(default=(), compare=False)  # kernels that come before it, each with its reason
    epilogue: Epilogue = Epilogue.STORE

    @property
    def title(self) -> str:
        """Kernel, tiles and epilogue."""
        return " ".join(filter(None, (self.kernel, self.config, self.epilogue.value)))


_SUM_OF_RANKS = Choice("sum in the order of ranks")  # the only one, on all devices


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The kernels of one layer."""

    qkv: Choice
    attend: Choice
    output: Choice
    gate_up: Choice | None = None  # of a dense MLP, or of an expert that all tokens have
    down: Choice | None = None
    router: Choice | None = None  # of a mixture of experts
    experts: Choice | None = None
    gates: Choice | None = None  # of a recurrent layer: its second projection
    query: Choice | None = None  # of latent attention: the second projection of queries
    all_reduce: Choice | None = None  # of what `output`, `down` and `experts` compute in part; None: one rank has all

    @property
    def reads_mlp(self) -> FormatId | None:
        """What the first product of the MLP reads: routers and experts read bfloat16."""
        return None if self.gate_up is None else self.gate_up.reads

    @property
    def choices(self) -> dict[str, Choice]:
        """The kernels, by their operations."""
        named = {
            "qkv": self.qkv, "gates": self.gates, "q_b": self.query, "attend": self.attend, "o_proj": self.output,
            "gate_up": self.gate_up, "down": self.down, "router": self.router, "experts": self.experts,
            "all_reduce": self.all_reduce,
        }  # fmt: skip
        return {name: choice for name, choice in named.items() if choice is not None}

    def share(self) -> LayerPlan:
        """Return the plan where ranks share the layer: their results are partial, and an all-reduce adds them up."""

        def part(choice: Choice | None) -> Choice | None:
            return None if choice is None else replace(choice, epilogue=Epilogue.PARTIAL)

        output = replace(self.output, epilogue=Epilogue.PARTIAL)
        down, experts = part(self.down), part(self.experts)
        return replace(self, output=output, down=down, experts=experts, all_reduce=_SUM_OF_RANKS)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The kernels of a step."""

    norms: NormStyle
    layers: tuple[LayerPlan, ...]
    head: Choice
    padded: int  # rows that the kernels compute
    refused: tuple[str, ...] = field(default=(), compare=False)  # other styles, each with its reason


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """The kernels of all sizes of step."""

    steps: Mapping[Bucket, StepPlan]

    def show(self) -> str:
        """Return the plan as text: for each size the kernels, equal layers and equal sizes folded."""
        shown = [(bucket, "\n".join(_show_step(step))) for bucket, step in self.steps.items()]
        parts: list[str] = []
        for text, group in itertools.groupby(shown, key=lambda one: one[1]):
            titles = [bucket.title for bucket, _ in group]
            parts.append(f"{titles[0] if len(titles) == 1 else f'{titles[0]} ... {titles[-1]}'}\n{text}")
        return "\n".join(parts) + "\n"


def _show_step(step: StepPlan) -> Iterator[str]:
    yield f"  {step.norms.value}"
    yield from (f"    not: {reason}" for reason in step.refused)
    start = 0
    for layer, group in itertools.groupby(step.layers):
        end = start + len(list(group))
        yield f"  layer {start}" if end == start + 1 else f"  layers {start}-{end - 1}"
        for name, choice in layer.choices.items():
            yield from _show_choice(name, choice)
        start = end
    yield "  output layer"
    yield from _show_choice("lm_head", step.head)


def _show_choice(name: str, choice: Choice) -> Iterator[str]:
    yield f"    {name:8} {choice.title}"
    yield from (f"             not: {reason}" for reason in choice.refused)
