# SPDX-License-Identifier: Apache-2.0
"""Read the rotary options of a config.json: one object since transformers 5, all over the file before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blink.fields import Fields, show
from blink.models.layers import QueryGrowth
from blink.models.rope import (
    YARN_FACTORS,
    YARN_MIN_THETA,
    YARN_TURNS,
    LinearScaling,
    Llama3Scaling,
    Rope,
    yarn_divisors,
)

_MAX_HEAD_DIM = 1 << 16
_KINDS = ("default", "llama3", "linear", "yarn", "longrope", "proportional")


def read_rope(config: Fields, head_dim: int) -> Rope:
    """Read the rotation of a model, or of its layers without a window."""
    options = _find_options(config)
    options = _find_part(options, "full_attention") or options
    return _make_rope(config.override(options), head_dim)


def read_local_rope(config: Fields, head_dim: int) -> Rope | None:
    """Read the rotation of layers with a window, where the model has one for them."""
    options = _find_part(_find_options(config), "sliding_attention")
    if options is not None:
        return _make_rope(config.override(options), head_dim)
    if config.has("rope_local_base_freq"):
        return Rope(theta=config.number("rope_local_base_freq"), rotary_dim=head_dim)
    return None


def read_score_growth(config: Fields) -> float:
    """Read by what latent attention's scores are multiplied in a context that YaRN stretches."""
    rope = config.override(_find_options(config))
    slope, factor = rope.number("mscale_all_dim", 0.0), rope.number("factor", 1.0)
    if rope.text("rope_type", rope.text("type", "default")) == "default" or factor <= 1:
        return 1.0
    return (0.1 * slope * math.log(factor) + 1) ** 2


def read_query_growth(config: Fields) -> QueryGrowth | None:
    """Read by what queries grow with their position, where a model has that."""
    options = Fields(_find_options(config), config.place)
    slope = options.number("llama_4_scaling_beta", 0.0)
    return QueryGrowth(slope, options.integer("original_max_position_embeddings")) if slope else None


def _find_part(options: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the options of one kind of layers, where a model has them."""
    part = options.get(name)
    return part if isinstance(part, dict) else None


def _find_options(config: Fields) -> Mapping[str, Any]:
    return config.mapping("rope_parameters" if config.has("rope_parameters") else "rope_scaling")


def _make_rope(rope: Fields, head_dim: int) -> Rope:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "su" or (kind == "yarn" and rope.has("long_factor")):  # what Phi-3 called it before
        kind = "longrope"
    rope.require(kind in _KINDS, f"rotary scaling {show(kind)}")
    theta = rope.number("rope_theta")
    if kind == "proportional":
        return _make_proportional_rope(rope, theta, head_dim)
    rotary_dim = int(min(head_dim, _MAX_HEAD_DIM) * min(rope.number("partial_rotary_factor", 1.0), 2.0))
    if kind == "longrope":
        return _make_long_rope(rope, theta, rotary_dim)
    if kind == "yarn":
        return _make_yarn_rope(rope, theta, rotary_dim)
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_len=rope.integer("original_max_position_embeddings"),
        )
    elif kind == "linear":
        scaling = LinearScaling(factor=rope.number("factor"))
    return Rope(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def _make_proportional_rope(rope: Fields, theta: float, head_dim: int) -> Rope:
    """Return the rotation of some of a head's pairs, at the frequencies that they have where all are rotated."""
    factor, pairs = rope.number("factor", 1.0), min(head_dim, _MAX_HEAD_DIM) // 2
    turning = int(rope.number("partial_rotary_factor", 1.0, high=1.0) * pairs)
    scaling = None if factor == 1 else LinearScaling(factor=factor)
    return Rope(theta=theta, rotary_dim=2 * pairs, scaling=scaling, still=pairs - turning)


def _make_long_rope(rope: Fields, theta: float, rotary_dim: int) -> Rope:
    original, factor = _read_lengths(rope)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return Rope(
        theta=theta,
        rotary_dim=rotary_dim,
        divisors=tuple(rope.numbers("short_factor")),
        long_divisors=tuple(rope.numbers("long_factor")),
        original_max_len=original,
        magnitude=rope.number("attention_factor", magnitude),
    )


def _make_yarn_rope(rope: Fields, theta: float, rotary_dim: int) -> Rope:
    original, factor = _read_lengths(rope)
    rope.require(theta >= YARN_MIN_THETA, f"a rotary base of {theta:g}")
    rope.require(YARN_FACTORS[0] <= factor <= YARN_FACTORS[1], f"a stretching by {factor:g}")
    rope.require(2 <= rotary_dim <= _MAX_HEAD_DIM, f"a rotated part of {rotary_dim} components")
    divisors = yarn_divisors(
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_len=original,
        turns=(_read_turns(rope, "beta_fast", 32.0), _read_turns(rope, "beta_slow", 1.0)),
        truncate=rope.flag("truncate", True),
    )
    growth = math.log(factor) if factor > 1 else 0.0
    scales = (rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0))
    numerator, denominator = scales if all(scales) else (1.0, 0.0)
    magnitude = (0.1 * numerator * growth + 1) / (0.1 * denominator * growth + 1)
    magnitude = rope.number("attention_factor", magnitude)
    return Rope(theta=theta, rotary_dim=rotary_dim, divisors=divisors, magnitude=magnitude)


def _read_turns(rope: Fields, key: str, default: float) -> float:
    return rope.number(key, default, low=YARN_TURNS[0], high=YARN_TURNS[1])


def _read_lengths(rope: Fields) -> tuple[int, float]:
    """Return the context before the scaling, and by which factor the scaling makes it longer."""
    longest = rope.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", longest)
    return original, rope.number("factor", longest / original, low=1e-6)
