# SPDX-License-Identifier: Apache-2.0
"""Latent: what multi-head latent attention (MLA) has beyond attention of one key-value head. Needs no torch.

A token keeps a vector of `rank` numbers, its latent, and one rotated key of `rope` numbers. Each head's keys and values
are projections of the latent. With those projections moved to the queries and to the result, all heads attend to the
one vector: see kernels/latent.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of a layer's projections."""

    rank: int  # of the latent
    rope: int  # of the part of each query, and of the one key, that is rotated
    nope: int  # of the part that is not
    value: int  # of a head's values
    query_rank: int = 0  # of what queries are projections of; 0: of the hidden state itself

    @property
    def kept(self) -> int:
        """Numbers that a token keeps."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Size of a head's query before its projection has moved to it."""
        return self.nope + self.rope

    @property
    def scale(self) -> float:
        """What scores are multiplied by, but for what YaRN adds."""
        return self.query**-0.5

    def in_size(self, heads: int) -> int:
        """Return the width of what is projected of the hidden state."""
        return self.kept + (self.query_rank or heads * self.query)

    def query_matrix(self, heads: int) -> tuple[int, int] | None:
        """Return rows and columns of the second projection of queries; None: there is none."""
        return (heads * self.query, self.query_rank) if self.query_rank else None

    def num_expanding_weights(self, heads: int) -> int:
        """Return the number of weights that make keys and values of latents; they are never quantized."""
        return heads * (self.nope + self.value) * self.rank
