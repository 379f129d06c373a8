# SPDX-License-Identifier: Apache-2.0
"""What `--deterministic` needs: kernels that give a token the same bits with any other tokens in its step."""

from __future__ import annotations

from collections.abc import Mapping

from blink.config import EngineConfig
from blink.errors import ConfigError
from blink.formats.layouts import Layout
from blink.models.spec import ModelSpec
from blink.plan.site import first_reason
from blink.runner.sites import ModelSites

_FLAG = "--deterministic"
_LANES = 16  # floats of a head that the native attention takes at a time


def refuse_on_gpu(config: EngineConfig) -> None:
    """Refuse the flag, with a `ConfigError`, where kernels are chosen by the number of rows."""
    if config.deterministic:
        raise ConfigError(f"{_FLAG} needs the CPU engine so far: add --device cpu")


def check_deterministic(sites: ModelSites) -> None:
    """Refuse, with a `ConfigError` that names it, what the flag has not been proved with."""
    if reason := first_reason({**_about_layers(sites.spec), **_about_memory(sites)}):
        raise ConfigError(f"{_FLAG} does not work with {reason}")


def _about_layers(spec: ModelSpec) -> Mapping[str, bool]:
    attentions = spec.attentions
    options = sorted({name for one in attentions for name in one.options_beyond()})
    return {
        "models that pool": spec.pooling is not None,
        "recurrent layers": any(layer.mixer.attention is None for layer in spec.distinct_layers),
        "mixtures of experts": spec.mixture is not None,
        **dict.fromkeys(options, True),
        "heads whose size is no multiple of 16": any(one.head_dim % _LANES for one in attentions),
    }


def _about_memory(sites: ModelSites) -> Mapping[str, bool]:
    matrices = [matrix for layer in sites.layers for matrix in layer.matrices]
    other = any(matrix.layout is not Layout.GGUF for matrix in (*matrices, sites.head))
    return {
        f"a KV cache in {sites.kv_dtype}": sites.kv_dtype not in ("float32", "float16"),
        "weights of other formats than GGUF's blocks": other,
    }
