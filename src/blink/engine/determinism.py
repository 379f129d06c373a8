# SPDX-License-Identifier: Apache-2.0
"""What `--deterministic` needs: kernels that give a token the same bits with any other tokens in its step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

import torch

from blink import __version__
from blink.config import EngineConfig, ModelConfig
from blink.errors import ConfigError
from blink.formats.layouts import Layout
from blink.models.spec import ModelSpec
from blink.models.weights.files import hash_file, resolve_model
from blink.plan.site import first_reason
from blink.runner.sites import ModelSites

_FLAG = "--deterministic"
_LANES = 16  # floats of a head that the native attention takes at a time
_VARIABLE = "VLLM_BATCH_INVARIANT"
_FILES = (".gguf", ".json")  # of a model directory, what decides the bits
_OPTIONS = ("load_format", "dtype", "quantization", "kv_cache_dtype", "hf_overrides")


def is_deterministic(config: EngineConfig) -> bool:
    """Return whether bits may not depend on what else runs: by the flag, or by vLLM's variable."""
    return config.deterministic or os.environ.get(_VARIABLE, "").lower() in ("1", "true")


def find_fingerprint(model: ModelConfig, block_size: int) -> str:
    """Return a hash of what decides an answer's bits: the files, their options, the kernels and this machine's kind."""
    path = resolve_model(model.model)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in _FILES)
    facts = {
        "files": [hash_file(each) for each in files],
        "options": [getattr(model, name) for name in _OPTIONS],
        "engine": ["cpu", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), block_size],
        "versions": [__version__, torch.__version__],
    }
    return "cpu-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def refuse_on_gpu(config: EngineConfig) -> None:
    """Refuse the flag, with a `ConfigError`, where kernels are chosen by the number of rows."""
    if is_deterministic(config):
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
