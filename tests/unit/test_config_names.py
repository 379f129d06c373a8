# SPDX-License-Identifier: Apache-2.0
"""Qwen's descriptions in the names of today and of yesterday say the same: rotary options, types, nested or flat.

transformers 5 writes `rope_parameters` and `dtype`; before it wrote `rope_theta`, `rope_scaling` and `torch_dtype`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from blink.models.families import FAMILIES as KNOWN
from blink.models.spec import ModelSpec
from blink.models.weights.source import read_spec
from model_families import FAMILIES, SMALL

Values = dict[str, Any]
SAVED: dict[str, Values] = json.loads(Path(__file__).with_name("saved_configs.json").read_text())
NAMES = ["qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
PICTURED = [name for name in NAMES if KNOWN[FAMILIES[name]["model_type"]].also_known_as]
# What a long context is stretched by, in the words of the models' pages.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}


def today(name: str, stretch: Mapping[str, Any]) -> Values:
    """A small model's description as transformers 5 saves it."""
    values = {**SMALL, **FAMILIES[name]}
    config = AutoConfig.for_model(**values).to_dict()
    rope = {**config["rope_parameters"], "rope_theta": 7e5, **stretch}
    return {**config, "rope_parameters": rope, "dtype": "bfloat16"}


def yesterday(config: Values) -> Values:
    """The same as transformers 4 saved it."""
    rope = dict(config["rope_parameters"])
    flat = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    others = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    is_plain = rope == {"rope_type": "default"}
    return {**others, **flat, "rope_scaling": None if is_plain else rope, "torch_dtype": "bfloat16"}


def long_ago(config: Values) -> Values:
    """The same with the kind of scaling under its first name."""
    old = yesterday(config)
    scaling = old["rope_scaling"]
    return {**old, "rope_scaling": scaling and {"type": scaling["rope_type"], **scaling, "rope_type": None}}


def both(config: Values) -> Values:
    """Both at once, as tools write that rename nothing; today's count."""
    return {**yesterday(config), **config, "rope_scaling": {"rope_type": "linear", "factor": 99.0}}


def nest(config: Values) -> Values:
    """The text part within a model that sees pictures."""
    [outer] = KNOWN[config["model_type"]].also_known_as
    return {"model_type": outer, "text_config": config, "vision_config": {"depth": 1}, "tie_word_embeddings": False}


def rename(config: Values) -> Values:
    """The text part alone under the name of the whole, as some fine-tunes have it."""
    [outer] = KNOWN[config["model_type"]].also_known_as
    return {**config, "model_type": outer}


def read(config: Values, folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize("stretch", [{}, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("form", [yesterday, long_ago, both])
@pytest.mark.parametrize("name", NAMES)
def test_old_names_of_rotary_options_say_the_same(
    name: str, form: Callable[[Values], Values], stretch: Mapping[str, Any], tmp_path: Path
) -> None:
    config = today(name, stretch)
    spec = read(config, tmp_path)
    [rope] = {attention.rope for attention in spec.attentions}
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    assert rope.theta == 7e5
    assert rope.rotary_dim == share * spec.attentions[0].head_dim
    assert bool(rope.divisors) is bool(stretch)
    assert read(form(config), tmp_path) == spec


@pytest.mark.parametrize("wrap", [nest, rename])
@pytest.mark.parametrize("form", [dict, yesterday])
@pytest.mark.parametrize("name", PICTURED)
def test_a_text_part_says_the_same_nested_and_flat(
    name: str, form: Callable[[Values], Values], wrap: Callable[[Values], Values], tmp_path: Path
) -> None:
    config = today(name, YARN)
    assert read(wrap(form(config)), tmp_path) == read(config, tmp_path)


def test_the_families_with_pictures_are_those_that_have_them() -> None:
    assert PICTURED == ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("name", SAVED)
def test_files_of_older_versions_of_transformers_are_read(name: str, tmp_path: Path) -> None:
    """As these versions saved them, against what today's makes of the same files."""
    spec = read(SAVED[name], tmp_path)
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    rope = config.rope_parameters
    assert spec.num_layers == config.num_hidden_layers
    assert {attention.rope.theta for attention in spec.attentions} == {rope["rope_theta"]}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    [rotary_dim] = {attention.rope.rotary_dim for attention in spec.attentions}
    assert rotary_dim == head_dim * rope.get("partial_rotary_factor", 1.0)
    kinds = getattr(config, "layer_types", ["full_attention"] * spec.num_layers)
    assert [layer.mixer.attention is None for layer in spec.layers] == [kind == "linear_attention" for kind in kinds]
