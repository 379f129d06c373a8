# SPDX-License-Identifier: Apache-2.0
"""What families read of published descriptions by rules of their own, and what they refuse."""

from __future__ import annotations

import json
import math
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
        ("ernie-4.5-0.3b", {"use_bias": True}, "use_bias"),
        ("granite-4.0-micro", {"layer_types": ["attention", "rwkv"] * 20}, "layer of type 'rwkv'"),
        ("granite-4.0-micro", {"layer_types": ["attention"]}, "'layer_types' must say of each layer"),
        ("granite-4.0-h-small", {"mamba_d_conv": 3}, "a convolution of 3 inputs"),
        ("granite-4.0-h-small", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("granite-4.0-h-small", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("granite-4.0-h-small", {"mamba_n_heads": 100}, "which 100 heads do not share"),
        ("granite-4.0-micro", {"position_embedding_type": "learned"}, "position embedding of type 'learned'"),
        ("smollm3-3b", {"no_rope_layers": [1, 1, 0]}, "'no_rope_layers' must say of each layer"),
        ("llama-3-8b", {"use_bidirectional_attention": True}, "attention to later tokens"),
    ],
)
def test_a_family_refuses_what_its_layers_do_not_do(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_changed(tmp_path, name, changes)


def test_layers_with_a_window_are_not_stretched(tmp_path: Path) -> None:
    """Olmo 3's files say of all layers how long contexts are reached, and mean those without a window."""
    spec = read_changed(tmp_path, "olmo-3-7b", {"rope_theta": 1e6})
    windowed, full = attention_of(spec.layers[0]), attention_of(spec.layers[3])
    assert (windowed.window, full.window) == (4096, 0)
    assert windowed.rope.theta == 5e5 and not windowed.rope.divisors and windowed.rope.magnitude == 1
    assert full.rope.theta == 1e6 and len(full.rope.divisors) == 64 and full.rope.magnitude > 1.2


@pytest.mark.parametrize(
    "changes", [{}, {"no_rope_layers": ...}, {"no_rope_layers": ..., "no_rope_layer_interval": ...}]
)
def test_every_fourth_layer_rotates_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = read_changed(tmp_path, "smollm3-3b", changes)
    assert [rotates(layer) for layer in spec.layers] == [True, True, True, False] * 9


def test_layers_of_llama_4_are_of_four_kinds(tmp_path: Path) -> None:
    """Three of four rotate, and see their own chunk; of Maverick, each second one has experts."""
    name = "llama-4-scout, of pictures too"
    scout = read_changed(tmp_path, name)
    found = [(rotates(layer), attention_of(layer).chunk) for layer in scout.layers]
    assert found == [*[(True, 8192)] * 3, (False, 0)] * 12
    assert [attention_of(layer).qk_norm for layer in scout.layers[:4]] == [*["plain_head"] * 3, "none"]
    growth = attention_of(scout.layers[3]).query_growth
    assert growth is not None and (growth.slope, growth.period, growth.offset) == (0.1, 8192, 1)
    assert attention_of(scout.layers[0]).query_growth is None
    assert scout.mixture is not None and (scout.mixture.size, scout.mixture.shared_size) == (8192, 8192)
    assert not any(attention_of(layer).chunk for layer in scout.limit(8192).layers)
    maverick = read_changed(tmp_path, name, interleave_moe_layer_step=2, use_qk_norm=False)
    assert [layer.mlp.mixture is None for layer in maverick.layers] == [True, False] * 24
    assert maverick.layers[0].mlp.size == 16384
    assert {attention.qk_norm for attention in maverick.attentions} == {"none"}
    listed = read_changed(tmp_path, name, moe_layers=[0, 47], attention_chunk_size=...)
    assert [index for index, layer in enumerate(listed.layers) if layer.mlp.mixture] == [0, 47]
    assert not any(attention.chunk for attention in listed.attentions)
    with pytest.raises(ConfigError, match="attention_bias"):
        read_changed(tmp_path, name, attention_bias=True)


def test_granite_has_recurrent_layers_where_its_file_says_so(tmp_path: Path) -> None:
    spec = read_changed(tmp_path, "granite-4.0-h-small")
    assert [index for index, layer in enumerate(spec.layers) if layer.mixer.attention] == [5, 15, 25, 35]
    assert spec.cache_layout.bytes_per_sequence(2) == 36 * (128 * 64 * 128 * 4 + 4 * 8448 * 2)
    renamed = ["full_attention" if layer.mixer.attention else "linear_attention" for layer in spec.layers]
    assert read_changed(tmp_path, "granite-4.0-h-small", {"layer_types": renamed}) == spec
    unbounded = {"time_step_limit": [0.0, math.inf]}
    assert read_changed(tmp_path, "granite-4.0-h-small", unbounded) == spec


def test_granite_rotates_only_where_its_file_says_so(tmp_path: Path) -> None:
    assert rotates(read_changed(tmp_path, "granite-4.0-micro").layers[0])
    assert not rotates(read_changed(tmp_path, "granite-4.0-micro", {"position_embedding_type": ...}).layers[0])


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("ministral-3-8b", "ministral3", "ministral3"),
        ("mistral-small-3.1-24b", "mistral", "mistral"),
        ("mistral-small-3.1-24b", ..., "mistral"),
    ],
)
def test_a_text_part_says_which_family_it_is(name: str, kind: Any, found: str, tmp_path: Path) -> None:
    assert read_changed(tmp_path, name, model_type=kind).architecture == found
    with pytest.raises(ConfigError, match="not supported"):
        read_changed(tmp_path, name, {"model_type": "mistral9"})


def test_sizes_of_layers_without_a_window_are_read_in_both_forms(tmp_path: Path) -> None:
    """Published files name them once for all such layers; transformers writes them for each layer."""
    published = read_changed(tmp_path, "gemma-4-31b")
    shapes = [attention_of(layer).shape for layer in published.layers]
    assert shapes == [*[(32, 16, 256)] * 5, (32, 4, 512)] * 10
    each = {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
    said: dict[str, Any] = {"global_head_dim": ..., "num_global_key_value_heads": ...}
    assert read_changed(tmp_path, "gemma-4-31b", **said, per_layer_config=each) == published
    each["5"] = {"head_dim": 128}
    with pytest.raises(ConfigError, match="more than two shapes"):
        read_changed(tmp_path, "gemma-4-31b", **said, per_layer_config=each)


def test_layers_share_the_keys_of_the_last_of_their_kind(tmp_path: Path) -> None:
    spec = read_changed(tmp_path, "gemma-4-e2b")
    sources = [attention_of(layer).kv_source for layer in spec.layers]
    assert sources == [None] * 15 + [*[13] * 4, 14] * 4
    assert [layer.mlp.size for layer in spec.layers] == [6144] * 15 + [12288] * 20
    assert sum(len(group.layers) for group in spec.cache_layout.groups) == 15


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"num_kv_shared_layers": 35}, "'num_kv_shared_layers'"),
        ({"num_kv_shared_layers": 31}, "'num_kv_shared_layers'"),
        ({"layer_types": ["sliding_attention"] * 35}, "a last layer with a window"),
    ],
)
def test_gemma_4_refuses_what_it_cannot_be(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_changed(tmp_path, "gemma-4-e2b", **changes)
