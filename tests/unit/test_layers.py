# SPDX-License-Identifier: Apache-2.0
"""Layers, what they keep in the cache, what kernels say of them; and that families are named in one folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import blink
from blink.errors import ConfigError
from blink.models.cache_layout import CacheLayout, PerToken
from blink.models.families import FAMILIES, GGUF_NAMES
from blink.models.layers import LayerSpec, repeat_layer
from blink.models.mlps import DenseMlp, MoeMlp, Router
from blink.models.rope import Rope
from model_specs import attention_of, make_attention, make_spec

_PACKAGE = Path(blink.__file__).parent
# What else has such names: parsers of texts and their flags, tokenizers, templates, and grammars of replies.
_OTHER_PLACES = (
    _PACKAGE / "models" / "families",
    _PACKAGE / "text",
    _PACKAGE / "grammar",
    _PACKAGE / "message_formats.py",
)
_OTHER_WORDS = {"opt", "seed"}  # of orjson's flags, and of sampling
_SCALINGS = {"Llama3Scaling"}  # named so in config.json of any family
MIXTURE = MoeMlp(experts=8, size=48, router=Router(top_k=3))


def test_equal_layers_are_one_object_and_windows_as_long_as_the_context_are_none() -> None:
    local = Rope(theta=5.0, rotary_dim=64)
    layer = LayerSpec(mixer=make_attention(4, 2, 64), mlp=DenseMlp(size=96))
    layers = repeat_layer(layer, (0, 30, 0, 30, 128), 128, local)
    assert [attention_of(one).window for one in layers] == [0, 30, 0, 30, 0]
    assert [attention_of(one).rope == local for one in layers] == [False, True, False, True, True]
    assert layers[0] is layers[2] and layers[1] is layers[3] and layers[0] == layer
    spec = replace(make_spec("llama", attention_of(layer), layer.mlp, num_layers=1), layers=layers)
    assert spec.distinct_layers == (layers[0], layers[1], layers[4])
    assert [attention_of(one).window for one in spec.limit(30).layers] == [0] * 5
    assert len({id(one) for one in spec.limit(64).layers}) == 3


def test_layers_of_both_kinds_add_up() -> None:
    dense = make_spec("llama", make_attention(4, 2, 64), DenseMlp(size=96), num_layers=3)
    both = replace(
        dense, layers=(*dense.layers, *make_spec("", attention_of(dense.layers[0]), MIXTURE, num_layers=2).layers)
    )
    assert both.mixture is MIXTURE and dense.mixture is None
    assert both.num_expert_weights == 2 * 8 * 3 * 512 * 48 and dense.num_expert_weights == 0
    attention = 512 * 64 * (2 * 4 + 2 * 2)
    assert both.num_matrix_weights == 5 * attention + 3 * 3 * 512 * 96 + both.num_expert_weights
    others = 2 * 8 * 512 + 5 * 2 * 512 + 512 + 2 * both.num_output_weights
    assert both.num_parameters == both.num_matrix_weights + others


def test_layers_that_keep_the_same_form_a_group() -> None:
    small, large = PerToken(kv_heads=2, head_dim=64), PerToken(kv_heads=4, head_dim=128)
    layout = CacheLayout.of([small, large, small])
    assert [group.layers for group in layout.groups] == [(0, 2), (1,)]
    assert layout.groups[0].shape(5, 16) == (2, 2, 5, 16, 2, 64)
    assert layout.bytes_per_block(16, 2) == 16 * 2 * 2 * (2 * 2 * 64 + 4 * 128)
    spec = make_spec("llama", make_attention(4, 2, 64), MIXTURE, num_layers=7)
    windowed = repeat_layer(spec.layers[0], (9, 0, 9, 0), 512)
    assert [group.layers for group in replace(spec, layers=windowed).cache_layout.groups] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"kv_heads": 3}, "query heads must be a multiple"),
        ({"head_dim": 63}, "size of a head must be even"),
        ({"rope": Rope(theta=1e4, rotary_dim=66)}, "rotated part must be even and within"),
        ({"rope": Rope(theta=0.5, rotary_dim=64)}, "rotary base, factors and divisors"),
    ],
)
def test_each_layer_is_checked(change: dict[str, object], rule: str) -> None:
    spec = make_spec("llama", make_attention(4, 2, 64), DenseMlp(size=96), num_layers=3)
    spec.check("here")
    changed = replace(spec.layers[0], mixer=replace(spec.layers[0].mixer, **change))
    with pytest.raises(ConfigError, match=f"here: .*{rule}"):
        replace(spec, layers=(*spec.layers, changed)).check("here")
    with pytest.raises(ConfigError, match="more experts than there are"):
        make_spec("", attention_of(spec.layers[0]), replace(MIXTURE, experts=2), num_layers=1).check("here")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"qk_norm": "head", "qkv_bias": True, "output_bias": True}, None),
        ({"qk_norm": "all_heads"}, "one norm over all heads"),
        ({"window": 100}, "window"),
        ({"softcap": 30.0}, "softcap"),
        ({"scale": 0.5}, "scale"),
        ({"sinks": True}, "sinks"),
        ({"rope": Rope(theta=1e4, rotary_dim=66)}, "66 rotated components"),
        ({"heads": 18}, "9 query heads per KV head"),
        ({"head_dim": 96}, "heads of 96"),
        ({"head_dim": 8}, "heads of 8"),
    ],
)
def test_the_decode_attention_says_why_it_refuses_a_layer(options: dict[str, object], reason: str | None) -> None:
    attention = pytest.importorskip("blink.kernels.gpu.attention.decode")
    mixer = replace(make_attention(8, 2, 128), **options)
    assert attention.refuses(mixer, 16, "bfloat16") == reason
    if reason is None:
        assert attention.refuses(mixer, 24, "bfloat16") == "blocks of 24 tokens"
        assert attention.refuses(mixer, 16, "float16") == "queries in float16"


def list_words(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield a file's names and strings, and whether each is a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, True
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(found := getattr(node, field, None), str):
                yield found, False


def test_families_are_named_in_one_folder() -> None:
    names = {*FAMILIES, *GGUF_NAMES, *(other for family in FAMILIES.values() for other in family.also_known_as)}
    stems = {re.sub(r"\d.*|_.*", "", name) for name in names} - _OTHER_WORDS
    found: list[str] = []
    for path in _PACKAGE.rglob("*.py"):
        if any(path.is_relative_to(place) for place in _OTHER_PLACES):
            continue
        for word, is_string in list_words(ast.parse(path.read_text())):
            plain = re.sub(r"llama_?cpp", "", word, flags=re.IGNORECASE)  # a program, whose API there is
            parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", plain)
            if word in names or (not is_string and word not in _SCALINGS and stems & {part.lower() for part in parts}):
                found.append(f"{path.relative_to(_PACKAGE)}: {word}")
    assert found == []
