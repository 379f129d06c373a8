# SPDX-License-Identifier: Apache-2.0
"""What /server_info tells: how the server was started, and what its engine says about itself. No secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from blink import __version__
from blink.config import FrontendConfig
from blink.link.client import RegionInfo

_SECRETS = {"api_key", "admin_api_key", "hf_token", "rdma_token_file"}
# What of the engine is told; the key of its block hashes is a secret.
_ENGINE_FIELDS = (
    "model",
    "max_model_len",
    "vocab_size",
    "block_size",
    "max_sequences",
    "prefix_caching",
    "scheduling_policy",
    "num_queue_pairs",
    "can_constrain",
)


def describe_server(config: FrontendConfig, engine: RegionInfo, stats: Mapping[str, int]) -> dict[str, Any]:
    """Return a description for operators and their tools."""
    return {
        "version": __version__,
        "frontend": _without_secrets(asdict(config)),
        "engine": {name: getattr(engine, name) for name in _ENGINE_FIELDS},
        "statistics": dict(stats),
    }


def _without_secrets(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, and those of objects among them, with nothing in the place of secrets."""
    return {
        name: None if name in _SECRETS else _without_secrets(value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
