# SPDX-License-Identifier: Apache-2.0
"""What Ollama's clients ask about a model: its size, its kind and what it can do."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from blink.errors import ConfigError
from blink.link.client import RegionInfo
from blink.models.weights.text_files import read_json
from blink.text.assets import ModelAssets
from blink.text.fill_in import find_marks

_WEIGHTS = ("*.safetensors", "*.gguf")
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def rfc3339(seconds: float | None = None) -> str:
    """Return a time (now without one; seconds since 1970) as Ollama writes it."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def describe(name: str, assets: ModelAssets) -> dict[str, Any]:
    """Return the entry of a list of models."""
    size, modified = _measure(assets.root)
    digest = hashlib.sha256(f"{name} {size} {modified}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(modified),
        "size": size,
        "digest": digest,
        "details": _details(assets),
    }


def describe_fully(name: str, assets: ModelAssets, engine: RegionInfo) -> dict[str, Any]:
    """Return the answer of /api/show."""
    family = _family(assets)
    parameters = [f"{name} {value}" for name, value in sorted(assets.sampling_defaults.items())]
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(parameters),
        "template": assets.template_source,
        "details": _details(assets),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": engine.max_model_len,
            f"{family}.vocab_size": engine.vocab_size,
        },
        "capabilities": _capabilities(assets),
        "modified_at": rfc3339(_measure(assets.root)[1]),
    }


def _capabilities(assets: ModelAssets) -> list[str]:
    can = {
        "completion": True,
        "tools": assets.chat_template is not None and assets.call_format is not None,
        "insert": find_marks(assets.tokenizer) is not None,
        "thinking": assets.reasoning_format is not None,
    }
    return [name for name, is_there in can.items() if is_there]


def _details(assets: ModelAssets) -> dict[str, Any]:
    config, family = _read_config(assets.root), _family(assets)
    quantization: Any = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method"):
        level = str(quantization["quant_method"]).upper()
    else:
        level = _TYPES.get(str(config.get("torch_dtype") or config.get("dtype")), "")
    return {
        "parent_model": "",
        "format": "safetensors" if Path(assets.root).is_dir() else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": level,
    }


def _family(assets: ModelAssets) -> str:
    return str(_read_config(assets.root).get("model_type") or "unknown")


@cache
def _read_config(root: str) -> Mapping[str, Any]:
    try:
        return read_json(Path(root) / "config.json") if Path(root).is_dir() else {}
    except ConfigError:  # it has gone since the start
        return {}


@cache
def _measure(root: str) -> tuple[int, float]:
    """Return the bytes of a model's weights, and when they were written last (seconds since 1970)."""
    path = Path(root)
    files = [file for pattern in _WEIGHTS for file in path.glob(pattern)] if path.is_dir() else [path]
    found = [file.stat() for file in files if file.is_file()]
    return sum(status.st_size for status in found), max((status.st_mtime for status in found), default=0.0)
