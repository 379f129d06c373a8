# SPDX-License-Identifier: Apache-2.0
"""Mamba2: a recurrent layer of heads that share what they read and write by groups. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blink.models.cache_layout import CONV_WIDTH, PerSequence
from blink.models.part import Part

MAMBA_RULE = "Mamba-2 rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Part):
    """A state-space layer: a state of one size, which each token decays and adds to. See kernels/mamba.py."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_bias: bool = True
    shares_group: bool = False  # all ranks have heads of the one group, over which outputs are normalised together

    @property
    def attention(self) -> None:
        """It is none."""
        return

    @property
    def recurrence(self) -> Mamba2:
        """It is one."""
        return self

    @property
    def delta_net(self) -> None:
        """It is none."""
        return

    @property
    def mamba(self) -> Mamba2:
        """It is one."""
        return self

    @property
    def rule(self) -> str:
        """What its kernels compute."""
        return MAMBA_RULE

    @property
    def channels(self) -> int:
        """Width of x, B and C, which are convolved."""
        return self.out_size + 2 * self.groups * self.state_size

    @property
    def in_size(self) -> int:
        """Width of what is projected of one token, but for a number of each head."""
        return self.channels + self.out_size

    @property
    def num_gates(self) -> int:
        """Width of the rest: the time step of each head."""
        return self.heads

    @property
    def out_size(self) -> int:
        """Width of what is projected back, and of its gate."""
        return self.heads * self.head_dim

    @property
    def rules(self) -> dict[str, bool]:
        """What the values must be to each other, and whether they are."""
        return {"the heads of recurrent layers must be a multiple of their groups": self.heads % self.groups == 0}

    @property
    def state(self) -> None:
        """It keeps nothing of a token."""
        return

    @property
    def recurrent_state(self) -> PerSequence:
        """What the layer keeps of a sequence."""
        state, inputs = (self.heads, self.state_size, self.head_dim), (CONV_WIDTH, self.channels)
        return PerSequence(state=state, inputs=inputs, gates=self.num_gates)

    def matrices(self, hidden: int) -> list[tuple[int, int]]:
        """Return rows and columns of the matrices that all tokens multiply with."""
        return [(self.in_size, hidden), (self.num_gates, hidden), (hidden, self.out_size)]

    def num_matrix_weights(self, hidden: int) -> int:
        """Return the number of weights in the matrices that are quantized: not the one of a row for each head."""
        return hidden * (self.in_size + self.out_size)

    def split_rules(self, size: int) -> dict[str, bool]:
        """Return what a number of ranks must divide, and whether it does."""
        return {
            f"{self.heads} heads of recurrent layers": self.heads % size == 0,
            f"{self.groups} groups of recurrent layers": self.groups == 1 or self.groups % size == 0,
        }

    def split(self, size: int) -> Mamba2:
        """Return what one of so many ranks has: its heads, and their groups or a copy of the only one."""
        groups = max(self.groups // size, 1)
        return replace(self, heads=self.heads // size, groups=groups, shares_group=size > 1 and self.groups == 1)

    def num_parameters(self, hidden: int) -> int:
        """Return the number of all weights."""
        others = (CONV_WIDTH + self.conv_bias) * self.channels + 3 * self.heads + self.out_size
        return self.num_matrix_weights(hidden) + self.num_gates * hidden + others
