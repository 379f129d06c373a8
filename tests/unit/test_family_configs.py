# SPDX-License-Identifier: Apache-2.0
"""What families read of published descriptions by rules of their own, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blink.errors import ConfigError
from blink.models.layers import LayerSpec
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from model_specs import attention_of

CASES = json.loads(Path(__file__).with_name("model_facts.json").read_text())


def read_changed(directory: Path, name: str, changes: dict[str, Any] | None = None, **of_text: Any) -> ModelSpec:
    """Read a recorded description with some of its values, or of its text part's, changed; ...: left out."""
    values = {**CASES[name]["config"], **(changes or {})}
    if "text_config" in values:
        values["text_config"] = {**values["text_config"], **of_text}
        values["text_config"] = {key: value for key, value in values["text_config"].items() if value is not ...}
    values = {key: value for key, value in values.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return read_config_json(directory)


def rotates(layer: LayerSpec) -> bool:
    return any(attention_of(layer).rope.frequencies())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama-3-8b", {"hidden_act": "relu"}, "activation 'relu'"),
        ("opt-125m", {"activation_function": "gelu"}, "activation 'gelu'"),
        ("opt-125m", {"layer_norm_elementwise_affine": False}, "a layer norm without weights"),
        ("opt-125m", {"_remove_final_layer_norm": True}, "no norm behind the last layer"),
    ],
)
def test_a_family_refuses_what_its_layers_do_not_do(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_changed(tmp_path, name, changes)
