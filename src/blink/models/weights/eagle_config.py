# SPDX-License-Identifier: Apache-2.0
"""Read the description of an EAGLE-3 draft head: config.json, as EAGLE or speculators write it. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.fields import Fields
from blink.models.layers import Attention
from blink.models.rope_json import read_rope
from blink.models.weights.text_files import read_json

_WHOLE = "transformer_layer_config"  # where speculators describe it
# What other heads need, by the names in their descriptions.
_UNKNOWN = ("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


def read_head_config(folder: str) -> Fields:
    """Read the description of one layer, wherever it stands in config.json; refuse what Blink does not do.

    Raises:
        ConfigError: it is missing, malformed, or of another kind of head.
    """
    place = Path(folder).expanduser() / "config.json"
    if not place.is_file():
        told = "has no config.json: give the folder of an EAGLE-3 head."
        raise ConfigError(f"--speculative-config: {place.parent} {told}")
    values: dict[str, Any] = dict(read_json(place))
    for part in (_WHOLE, "eagle_config"):
        values |= Fields(values, str(place)).mapping(part)
    config = Fields(values, str(place))
    for name in _UNKNOWN:
        config.require(not config.flag(name), name)
    config.require(config.flag("use_aux_hidden_state", True), "use_aux_hidden_state: false")
    config.require(config.integer("num_hidden_layers", 1) == 1, "a draft head of several layers")
    config.require(config.text("hidden_act", "silu") == "silu", "another activation than silu")
    return config


def read_head_attention(config: Fields, max_model_len: int) -> Attention:
    """Return the attention of a head's layer, for a model's longest text.

    Raises:
        ConfigError: it cannot be as it is described.
    """
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    kv_heads = config.integer("num_key_value_heads", heads)
    rope = read_rope(config, head_dim).fit(max_model_len)
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope)
    for rule, holds in attention.rules.items():
        if not holds:
            raise ConfigError(f"{config.place}: {rule}; download the head again.")
    return attention
