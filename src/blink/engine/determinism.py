# SPDX-License-Identifier: Apache-2.0
"""What `--deterministic` needs: kernels that give a token the same bits with any other tokens in its step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from blink import __version__
from blink.config import EngineConfig, ModelConfig
from blink.errors import ConfigError
from blink.formats.layouts import Layout, Matrix
from blink.formats.schemes import FP8_ROW
from blink.models.decoder import Decoder
from blink.models.spec import ModelSpec
from blink.models.weights.files import hash_file, resolve_model
from blink.plan.site import first_reason
from blink.runner.run import Runner
from blink.runner.sites import ModelSites, sites_of

if TYPE_CHECKING:
    from blink.region.memory import Region

_FLAG = "--deterministic"
_LANES = 16  # floats of a head that the native attention takes at a time
_VARIABLE = "VLLM_BATCH_INVARIANT"
_FILES = (".gguf", ".json")  # of a model directory, what decides the bits
_OPTIONS = ("load_format", "dtype", "quantization", "kv_cache_dtype", "hf_overrides")


def is_deterministic(config: EngineConfig) -> bool:
    """Return whether bits may not depend on what else runs: by the flag, or by vLLM's variable."""
    return config.deterministic or os.environ.get(_VARIABLE, "").lower() in ("1", "true")


def make_runner(model: Decoder, config: EngineConfig) -> Runner:
    """Run a model, with the same bits whatever else runs if that is asked for.

    Raises:
        ConfigError: the flag has not been proved with the model.
    """
    deterministic = is_deterministic(config)
    if deterministic:
        check_deterministic(sites_of(model, config.block_size), model.device.type)
    return Runner(model, deterministic=deterministic)


def write_fingerprint(region: Region, config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Tell frontends the fingerprint, if bits may not depend on what else runs."""
    if is_deterministic(config):
        region.header["fingerprint"] = find_fingerprint(model, config.block_size, device.type).encode()


def find_fingerprint(model: ModelConfig, block_size: int, device: str = "cpu") -> str:
    """Return a hash of what decides an answer's bits: the files, their options, the kernels and this machine's kind."""
    path = resolve_model(model.model)
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in _FILES)
    if device == "cpu":
        kind = [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    else:
        kind = [torch.cuda.get_device_name(), torch.version.cuda, version("triton")]
    facts = {
        "files": [hash_file(each) for each in files],
        "options": [getattr(model, name) for name in _OPTIONS],
        "engine": [device, *kind, block_size],
        "versions": [__version__, torch.__version__],
    }
    return f"{device}-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def check_deterministic(sites: ModelSites, device: str) -> None:
    """Refuse, with a `ConfigError` that names it, what the flag has not been proved with; device: "cpu" or "cuda"."""
    reasons = {**_about_layers(sites.spec), **(_about_cpu(sites) if device == "cpu" else _about_gpu(sites))}
    if reason := first_reason(reasons):
        raise ConfigError(f"{_FLAG} does not work with {reason}")


def _about_layers(spec: ModelSpec) -> Mapping[str, bool]:
    return {
        "models that pool": spec.pooling is not None,
        "recurrent layers": any(layer.mixer.attention is None for layer in spec.distinct_layers),
        "mixtures of experts": spec.mixture is not None,
    }


def _about_cpu(sites: ModelSites) -> Mapping[str, bool]:
    attentions = sites.spec.attentions
    options = sorted({name for one in attentions for name in one.options_beyond()})
    return {
        **dict.fromkeys(options, True),
        "heads whose size is no multiple of 16": any(one.head_dim % _LANES for one in attentions),
        f"a KV cache in {sites.kv_dtype}": sites.kv_dtype not in ("float32", "float16"),
        "weights of other formats than GGUF's blocks": any(one.layout is not Layout.GGUF for one in _list(sites)),
    }


def _about_gpu(sites: ModelSites) -> Mapping[str, bool]:
    spec = sites.spec
    options = set(spec.options_beyond("tie_embeddings", "quantization", "rollback"))
    for layer in spec.distinct_layers:
        options |= {*layer.options_beyond(), *layer.mlp.options_beyond()}
    for attention in spec.attentions:
        options |= {*attention.options_beyond("qk_norm", "qkv_bias")}
        options |= {"one norm over all heads"} if attention.qk_norm == "all_heads" else set()
    return {
        **dict.fromkeys(sorted(options), True),
        f"activations in {sites.dtype}": sites.dtype != "bfloat16",
        f"a KV cache in {sites.kv_dtype}": sites.kv_dtype != sites.dtype,
        "weights in other formats than bfloat16 and FP8 with a scale for each row": any(
            one.layout is not Layout.ROWS and one.encoding != FP8_ROW for one in _list(sites)
        ),
    }


def _list(sites: ModelSites) -> Iterator[Matrix]:
    for layer in sites.layers:
        yield from layer.matrices
    yield sites.head
