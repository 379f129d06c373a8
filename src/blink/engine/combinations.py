# SPDX-License-Identifier: Apache-2.0
"""Features of an engine that do not go together: the one table of them, with what to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from blink.config import EngineConfig
from blink.engine.determinism import is_deterministic
from blink.engine.rounding import find_rounding
from blink.errors import ConfigError

Feature = Callable[[EngineConfig], bool]  # whether a configuration has it


class Combination(NamedTuple):
    """Two features that do not go together."""

    first: Feature
    second: Feature
    told: str  # of which {config} is the configuration
    device: str = ""  # the only kind of device on which they do not; empty: on none they do


def _serves_adapters(config: EngineConfig) -> bool:
    return config.lora.enable_lora


def _has_ranks(config: EngineConfig) -> bool:
    return config.has_ranks


def _has_draft_head(config: EngineConfig) -> bool:
    return config.speculation.has_head


def _rounds_activations(config: EngineConfig) -> bool:
    return find_rounding(config).activations


def _rounds_prompts(config: EngineConfig) -> bool:
    return find_rounding(config).prompts


def _serves_other_machines(config: EngineConfig) -> bool:
    return bool(config.rdma_listen)


def _has_huge_steps(config: EngineConfig) -> bool:
    return config.max_num_batched_tokens > _MOST_TOKENS


_MOST_TOKENS = 65_535  # of a step in one order: the largest second dimension of a kernel's grid of blocks
_HUGE_STEPS = f"--deterministic takes steps of up to {_MOST_TOKENS} tokens: lower --max-num-batched-tokens"
_ACTIVATIONS = "--cpu-gemm int16 goes neither with --deterministic nor with --tensor-parallel-size"
_PROMPTS = "--cpu-prompt-gemm bfloat16 goes neither with --deterministic nor with --tensor-parallel-size"

COMBINATIONS = (
    Combination(
        _serves_adapters,
        _serves_other_machines,
        "--enable-lora: frontends of other machines (--rdma-listen) take no adapters yet",
    ),
    Combination(
        _serves_adapters,
        is_deterministic,
        "--deterministic does not go with --enable-lora: leave one of the two out",
    ),
    Combination(
        _serves_adapters,
        _has_draft_head,
        "draft heads and adapters do not run together on GPUs: leave out --enable-lora",
        device="cuda",
    ),
    Combination(_has_ranks, is_deterministic, "--deterministic works with one rank: leave --tensor-parallel-size out"),
    Combination(
        _has_ranks,
        _has_draft_head,
        "--speculative-config: draft heads run on one rank: leave out --tensor-parallel-size "
        "{config.tensor_parallel_size}",
    ),
    Combination(_has_huge_steps, is_deterministic, _HUGE_STEPS, device="cuda"),
    Combination(_rounds_activations, is_deterministic, _ACTIVATIONS, device="cpu"),
    Combination(_rounds_activations, _has_ranks, _ACTIVATIONS, device="cpu"),
    Combination(_rounds_prompts, is_deterministic, _PROMPTS, device="cpu"),
    Combination(_rounds_prompts, _has_ranks, _PROMPTS, device="cpu"),
)


def check_combinations(config: EngineConfig, device: str) -> None:
    """Refuse a configuration whose features do not go together; device: "cpu" or "cuda".

    Raises:
        ConfigError: two of them do not.
    """
    for one in COMBINATIONS:
        if one.device in ("", device) and one.first(config) and one.second(config):
            raise ConfigError(one.told.format(config=config))
