# SPDX-License-Identifier: Apache-2.0
"""`blink doctor MODEL --speculative-config JSON`: what a draft head takes of memory. Loads no weights, no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from blink.cli.finding import Finding
from blink.errors import ConfigError
from blink.fields import one_line
from blink.models.cache_layout import CacheLayout
from blink.models.mtp_spec import count_mtp_weights, describe_mtp
from blink.models.spec import ModelSpec
from blink.models.weights.eagle_config import read_head_attention, read_head_config
from blink.models.weights.shards import list_shards
from blink.speculation import Speculation, check_on_gpu

_GIB, _KIB = 2**30, 2**10
_FLOATS = ("F64", "F32", "F16", "BF16")


def examine_head(
    spec: ModelSpec, speculation: Speculation, size: int, *, on_gpu: bool
) -> tuple[ModelSpec, int, Finding | None]:
    """Return a model with the layer of its draft head, the bytes of the head, and what to say of drafts.

    size: bytes of a number. None: there is nothing to say.
    """
    try:
        if on_gpu:
            check_on_gpu(speculation, spec, spec.shard.size)
        if not speculation.has_head:
            return spec, 0, None
        with_head, count = add_head(spec, speculation)
    except ConfigError as error:
        return spec, 0, Finding("fail", "drafts", error.message)
    assert with_head.drafter is not None
    token = CacheLayout.of([with_head.drafter.state]).bytes_per_block(1, size) / _KIB
    text = f"the head has {count * size / _GIB:.2f} GiB of weights, and keeps {token:g} KiB of each token"
    return with_head, count * size, Finding("ok", "drafts", text)


def add_head(spec: ModelSpec, speculation: Speculation) -> tuple[ModelSpec, int]:
    """Return a model with the layer of its draft head in the KV cache, and the number of the head's weights.

    Raises:
        ConfigError: there is no such head.
    """
    if speculation.mtp:
        layer = describe_mtp(spec)
        return replace(spec, drafter=layer.attentions[0]), count_mtp_weights(layer)
    attention = read_head_attention(read_head_config(speculation.head), spec.max_model_len)
    shards = list_shards(Path(speculation.head).expanduser())
    return replace(spec, drafter=attention), sum(map(_count_floats, shards))


def _count_floats(shard: Path) -> int:
    """Return how many numbers of a file are weights, which others name tokens."""
    try:
        with safe_open(shard, framework="np") as file:
            parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - no mapping
            return sum(math.prod(part.get_shape()) for part in parts if part.get_dtype() in _FLOATS)
    except Exception as error:  # the library's error type is not public
        raise ConfigError(f"{shard} is not a readable safetensors file ({one_line(error)}).") from error
