# SPDX-License-Identifier: Apache-2.0
"""MLPs: what each token of a layer goes through by itself, but for the weights. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from blink.models.part import Part

Activation = Literal["silu", "gelu_tanh", "clipped_silu", "relu"]

_EXPERT_COLUMNS = 16  # that a GPU's matrix units take of an expert together, so that ranks do not part them


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp(Part):
    """One MLP for all tokens, which is gated unless its activation is a plain function."""

    size: int
    activation: Activation = "silu"
    biases: bool = False

    @property
    def dense(self) -> DenseMlp:
        """It is one."""
        return self

    @property
    def mixture(self) -> None:
        """It is none."""
        return

    @property
    def active(self) -> DenseMlp:
        """What one token takes."""
        return self

    @property
    def rules(self) -> dict[str, bool]:
        """There are none."""
        return {}

    @property
    def inner_size(self) -> int:
        """Width of what the activation reads: gates and what they gate, or one of both."""
        return self.size if self.activation == "relu" else 2 * self.size

    def matrices(self, hidden: int) -> list[tuple[int, int]]:
        """Return rows and columns of the matrices that all tokens multiply with."""
        return [(self.inner_size, hidden), (hidden, self.size)]

    def num_matrix_weights(self, hidden: int) -> int:
        """Return the number of weights in the matrices."""
        return hidden * (self.inner_size + self.size)

    def num_expert_weights(self, hidden: int) -> int:  # noqa: ARG002 - as MoeMlp has it
        """Return the number of weights in experts' matrices."""
        return 0

    def num_parameters(self, hidden: int) -> int:
        """Return the number of all weights."""
        return self.num_matrix_weights(hidden) + self.biases * (self.inner_size + hidden)

    def split_rules(self, size: int, block: int) -> dict[str, bool]:
        """Return what a number of ranks must divide, and whether it does; block: columns that share a scale."""
        return {_name_width("an MLP", self.size, block): self.size % (size * block) == 0}

    def split(self, size: int, block: int) -> DenseMlp:  # noqa: ARG002 - as MoeMlp has it
        """Return what one of so many ranks has."""
        return replace(self, size=self.size // size)


def _name_width(part: str, size: int, block: int) -> str:
    return f"{part}'s width of {size}" + (f" in blocks of {block}" if block > 1 else "")


Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(Part):
    """How a token chooses experts: those with the highest scores, which are their weights. See kernels/router.py."""

    top_k: int
    renormalize: bool = False  # the chosen scores sum to 1
    score: Score = "softmax"  # over all experts, or each one's sigmoid
    has_bias: bool = False  # it is added to scores for the choice alone
    groups: int = 1  # of experts, of which a token has those of the best ones
    top_groups: int = 1
    group_best: int = 2  # how many of a group's best scores make its own
    scale: float = 1.0  # of the weights, when all else is done

    @property
    def is_plain(self) -> bool:
        """Whether softmax and the highest logits are all of it, which kernels of experts compute themselves."""
        return not self.options_beyond("renormalize")

    def find_rules(self, experts: int) -> dict[str, bool]:
        """Return what the values must be to each other and to the number of experts, and whether they are."""
        size, rest = divmod(experts, self.groups)
        return {
            "a token cannot have more experts than there are": self.top_k <= experts,
            "groups of experts must be of one size, and some of them": rest == 0 and self.top_groups <= self.groups,
            "the groups that a token has must hold enough experts": self.top_k <= self.top_groups * size,
            "a group must have as many experts as make its score": self.groups == 1 or self.group_best <= size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp(Part):
    """A gated MLP per expert, of which each token has a few."""

    experts: int
    size: int  # of each expert
    router: Router
    activation: Activation = "silu"
    biases: bool = False  # of router and experts
    shared_size: int = 0  # of an expert that all tokens have, times the sigmoid of a gate; 0: there is none
    shared_gate: bool = True  # False: as it is
    scales_inputs: bool = False  # a token's one expert reads the token times the sigmoid of its logit
    held: int = 0  # how many of the experts a rank has, each of them whole; 0: all, or a part of each
    # The shared one has no gate but norms of its own, as the experts have; the router reads the residual's own norm.
    is_beside: bool = False

    @property
    def dense(self) -> DenseMlp | None:
        """The expert that all tokens have."""
        return DenseMlp(size=self.shared_size, activation=self.activation) if self.shared_size else None

    @property
    def mixture(self) -> MoeMlp:
        """It is one."""
        return self

    @property
    def own_experts(self) -> int:
        """How many experts a rank has matrices of."""
        return self.held or self.experts

    @property
    def has_plain_experts(self) -> bool:
        """Whether SiLU and two matrices are all that an expert is, and all of the router's experts are here."""
        return self.activation == "silu" and not self.biases and not self.held

    @property
    def active(self) -> MoeMlp:
        """What one token takes; of a rank with whole experts its mean share, rounded up."""
        top_k = self.router.top_k
        return replace(self, experts=top_k, held=math.ceil(top_k * self.held / self.experts))

    @property
    def rules(self) -> dict[str, bool]:
        """What the values must be to each other, and whether they are."""
        return {
            **self.router.find_rules(self.experts),
            "a token whose expert's input is scaled has one expert": not self.scales_inputs or self.router.top_k == 1,
        }

    def matrices(self, hidden: int) -> list[tuple[int, int]]:
        """Return rows and columns of the matrices that all tokens multiply with: the router's, a shared expert's."""
        shared = [(2 * self.shared_size, hidden), (hidden, self.shared_size)] if self.shared_size else []
        return [(self.experts, hidden), *shared]

    def num_matrix_weights(self, hidden: int) -> int:
        """Return the number of weights in the matrices, but for the router's."""
        return self.num_expert_weights(hidden) + 3 * hidden * self.shared_size

    def num_expert_weights(self, hidden: int) -> int:
        """Return the number of weights in experts' matrices."""
        return self.own_experts * 3 * hidden * self.size

    def num_parameters(self, hidden: int) -> int:
        """Return the number of all weights, the router's and its bias too."""
        biases = self.biases * (self.own_experts * (2 * self.size + hidden) + self.experts)
        shared_gate = hidden if self.shared_size and self.shared_gate else 0
        others = 4 * hidden + self.experts if self.is_beside else shared_gate
        router = (hidden + self.router.has_bias) * self.experts
        return self.num_matrix_weights(hidden) + router + others + biases

    def split_rules(self, size: int, block: int) -> dict[str, bool]:
        """Return what a number of ranks must divide, and whether it does; block: columns that share a scale."""
        shared = {} if self.dense is None else self.dense.split_rules(size, block)
        parted = math.lcm(block, _EXPERT_COLUMNS)
        name = f"{_name_width('each expert', self.size, parted)} or {self.experts} experts"
        return {name: self._has_parts(size, block) or self.experts % size == 0, **shared}

    def split(self, size: int, block: int) -> MoeMlp:
        """Return what one of so many ranks has: a part of each expert, or whole ones where blocks forbid parts."""
        own = replace(self, shared_size=self.shared_size // size)
        if self._has_parts(size, block):
            return replace(own, size=self.size // size)
        return replace(own, held=self.experts // size)

    def _has_parts(self, size: int, block: int) -> bool:
        return size == 1 or self.size % (size * math.lcm(block, _EXPERT_COLUMNS)) == 0
