# SPDX-License-Identifier: Apache-2.0
"""What the operations and their code for each device agree on besides the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from blink.region.layout import CONSTANTS

# Below this temperature sampling is greedy, as in vLLM.
GREEDY_TEMPERATURE = 1e-5
# Sampled of a row whose largest logit, as changed and scaled, is not finite: that sequence alone ends with an error.
INVALID_LOGITS = CONSTANTS["invalid_logits"]
# Sampled of a row whose automaton allows nothing more, and whose text may end.
GRAMMAR_DONE = CONSTANTS["grammar_done"]

Activation = Literal["silu", "gelu_tanh", "clipped_silu", "relu"]
CLIP_LIMIT, CLIP_SLOPE = 7.0, 1.702  # of clipped_silu


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm that subtracts the mean and has a bias."""

    weight: Tensor  # [hidden]
    bias: Tensor  # [hidden]
    replaces: bool = False  # the residual goes on as the norm of itself


Norm = Tensor | LayerNorm  # a tensor [hidden] is the weight of an RMS norm


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The RMS norms of each query head and each key head."""

    query_weight: Tensor  # [head_dim]
    key_weight: Tensor  # [head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class KvScales:
    """What a layer's KV cache in FP8 holds keys and values divided by."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer's attention does beside softmax(Q K^T * scale) V."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: as they are
    window: int = 0  # how many keys a query sees at most, its own included; 0: all
    sinks: Tensor | None = None  # float32 [heads]; a score of each head that takes part in the softmax without a value
    kv_scales: KvScales = UNSCALED
    chunk: int = 0  # a query sees the keys of its own chunk of so many tokens; 0: all

    def scale_for(self, head_dim: int) -> float:
        """Return the factor of the scores of keys as the cache holds them."""
        return (head_dim**-0.5 if self.scale is None else self.scale) * self.kv_scales.key


PLAIN_ATTENTION = AttentionOptions()

LATENT_EPS = 1e-6  # of the norms of latents, whatever a config.json says of the others


class LatentSizes(NamedTuple):
    """What a plan of latent attention depends on."""

    heads: int
    rank: int
    rope: int


class ExpandedSizes(NamedTuple):
    """What a plan depends on of a step in which prompts have keys and values made of latents."""

    latents: LatentSizes
    nope: int  # of a head's key, beside what all heads rotate
    value: int


class Expansion(NamedTuple):
    """What makes keys and values of latents, by latent.py."""

    norm: Tensor  # [rank], of the latent's norm
    keys: Tensor  # [heads, nope, rank]
    values: Tensor  # [heads, value, rank]

    @property
    def rank(self) -> int:
        """Size of a latent."""
        return self.norm.shape[0]
