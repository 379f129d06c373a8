# SPDX-License-Identifier: Apache-2.0
"""What Blink reads of models' descriptions and what follows from it, as plain values to compare with recorded ones."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

import blink.models
from blink.cli import model_fit
from blink.models.families import FAMILIES
from blink.models.layers import LayerSpec
from blink.models.mlps import MoeMlp
from blink.models.part import Part
from blink.models.rope import Rope
from blink.models.spec import ModelSpec
from blink.models.weights.config_json import read_config_json
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.gguf_metadata import read_gguf_spec

CONFIGS = Path(blink.models.__file__).parent / "configs"
_ROOM = 80 << 30
_TOLD_OF_MODELS = ("tie_embeddings", "embedding_scale", "logits_softcap", "logits_divisor", "quantization")
_TOLD_OF_ATTENTION = ("window", "softcap", "scale", "sinks", "qk_norm", "qkv_bias", "output_bias")


def read_case(case: dict[str, Any], directory: Path) -> ModelSpec:
    """Read a recorded description: a config.json's values or those of a GGUF file."""
    if "gguf" in case:
        spec = read_gguf_spec(_make_gguf(case["gguf"], directory))
    else:
        (directory / "config.json").write_text(json.dumps(case["config"]))
        spec = read_config_json(directory)
    spec.check("the case")
    return spec


def _make_gguf(case: dict[str, Any], directory: Path) -> GgufFile:
    shapes = {**case["tensors"], **{f"blk.{layer}.any": [1] for layer in range(case["layers"])}}
    tensors = {name: SimpleNamespace(shape=tuple(shape)) for name, shape in shapes.items()}
    file = SimpleNamespace(
        path=directory / "model.gguf",
        metadata=case["metadata"],
        tensors=tensors,
        read_tensor=lambda name: np.arange(1, tensors[name].shape[0] + 1, dtype=np.float32),
    )
    return cast(GgufFile, file)


def describe(spec: ModelSpec) -> dict[str, Any]:
    """Return what a spec says and what memory it asks for; equal neighbouring layers are counted."""
    counted = {
        f"{size}{' quantized' if stays else ''}": asdict(model_fit.count_weights(spec, size, stays_quantized=stays))
        for size, stays in ((4, False), (2, True))
    }
    [*_, kv_cache] = model_fit._examine_room(spec, _ROOM, model_fit.count_weights(spec, 2, stays_quantized=True), 2)
    layers, shorter = _describe_layers(spec), _describe_layers(spec.limit(max(2, spec.max_model_len // 8)))
    found = {
        "model": _describe_model(spec),
        "layers": layers,
        "layers_of_an_eighth": "the same" if shorter == layers else shorter,
        "num_parameters": spec.num_parameters,
        "num_matrix_weights": spec.num_matrix_weights,
        "num_expert_weights": spec.num_expert_weights,
        "num_output_weights": spec.num_output_weights,
        "weight_bytes": counted,
        "kv_numbers_of_a_block": spec.cache_layout.bytes_per_block(16, 1),
        "kv_cache_in_80_gib": f"{kv_cache.level}: {kv_cache.text}",
        "text": model_fit._describe(spec),
    }
    return json.loads(json.dumps(found))


def _describe_model(spec: ModelSpec) -> dict[str, Any]:
    experts = FAMILIES[spec.architecture].experts
    return {
        "architecture": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_model_len": spec.max_model_len,
        "tie_embeddings": spec.tie_embeddings,
        "shifted_norms": FAMILIES[spec.architecture].shifted_norms,
        "embedding_scale": spec.embedding_scale,
        "logits_softcap": spec.logits_softcap,
        "logits_divisor": spec.logits_divisor,
        "quantization": None if spec.quantization is None else asdict(spec.quantization),
        "experts": "" if experts is None else experts.block,
        **_describe_options(spec, *_TOLD_OF_MODELS),
    }


def _describe_options(part: Part, *told: str) -> dict[str, Any]:
    """Return the options of a part that are not at their defaults, but for those told of all."""
    found: dict[str, Any] = {name: getattr(part, name) for name in part.options_beyond(*told)}
    return {name: asdict(cast(Any, value)) if is_dataclass(value) else value for name, value in found.items()}


def _describe_layers(spec: ModelSpec) -> dict[str, Any]:
    """Return the different layers, and which of them stands where."""
    kinds = list(spec.distinct_layers)
    order = "".join(str(kinds.index(layer)) for layer in spec.layers)
    return {"kinds": [_describe_layer(layer) for layer in kinds], "order": order}


def _describe_layer(layer: LayerSpec) -> dict[str, Any]:
    attention, mlp = layer.mixer.attention, layer.mlp
    mixture = mlp if isinstance(mlp, MoeMlp) else None
    of_mlp = {
        "norms": layer.norms,
        "residual_scale": layer.residual_scale,
        "activation": mlp.activation,
        "dense_size": 0 if mixture else mlp.size,
        "experts": [mixture.experts, mlp.size, mixture.router.top_k, mixture.router.renormalize]
        if mixture
        else [0, 0, 0, False],
        "expert_biases": mixture is not None and mixture.biases,
        **({"shared_expert": mixture.shared_size} if mixture and mixture.shared_size else {}),
        **({} if mixture is None or mixture.router.is_plain else {"router": _describe_options(mixture.router)}),
        **_describe_options(layer, "norms", "residual_scale"),
        **({} if mixture and mixture.biases else _describe_options(mlp, "activation", "shared_size")),
    }
    if attention is None:
        return {"recurrent": asdict(cast(Any, layer.mixer)), **of_mlp}
    return {
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope": _describe_rope(attention.rope),
        "window": attention.window,
        "softcap": attention.softcap,
        "scale": attention.scale,
        "sinks": attention.sinks,
        "qk_norm": attention.qk_norm.replace("_", " "),
        "biases": [attention.qkv_bias, attention.output_bias],
        **_describe_options(attention, *_TOLD_OF_ATTENTION),
        **of_mlp,
    }


def _describe_rope(rope: Rope) -> dict[str, Any]:
    parts = {"divisors": rope.divisors, "long_divisors": rope.long_divisors, "frequencies": rope.frequencies()}
    short = {name: [len(values), *(float(f"{value:.9g}") for value in values[1::19])] for name, values in parts.items()}
    still = {} if rope.still else {"still"}  # recorded where there are some
    return {name: value for name, value in (asdict(rope) | short).items() if name not in still}
