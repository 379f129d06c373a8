# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json, as PEFT writes it: what of it is obeyed, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink.errors import BadRequestError

PARAM = "lora_path"
_MAX_BYTES = 1 << 20
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:\.post\d+)?")
# What changes the result and is not computed here, unless it is as good as absent.
_REFUSED = (
    "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication", "rank_pattern",
    "alpha_pattern", "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # that leave the base model's weights as they are


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter's configuration says of its tensors."""

    rank: int
    scale: float  # of what the tensors make of an input
    targets: frozenset[str] | None  # ends of the modules' names; None: an expression says it
    parameters: frozenset[str]  # ends of the names of parameters that have a matrix of each expert
    version: tuple[int, int, int] | None  # PEFT's that wrote it; None: none that was released


def read_config(folder: Path, max_rank: int) -> AdapterConfig:
    """Read an adapter's configuration.

    Raises:
        BadRequestError: it is missing, malformed, or asks for what is not done here.
    """
    values = _read_object(folder / "adapter_config.json")
    if values.get("peft_type") != "LORA":
        raise refuse(f"peft_type must be LORA, got {_show(values.get('peft_type'))}")
    for name in _REFUSED:
        if values.get(name):
            raise refuse(f"{name} is not supported")
    if values.get("bias", "none") != "none":
        raise refuse(f"bias must be none, got {_show(values['bias'])}")
    start = values.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in _STARTS:
        raise refuse(f"init_lora_weights {_show(start)} is not supported: it changes the base model's weights")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise refuse(f"r must be a whole number from 1 on, got {_show(rank)}")
    if rank > max_rank:
        raise refuse(f"r is {rank}, and --max-lora-rank {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e6:
        raise refuse(f"lora_alpha must be a number above 0, got {_show(alpha)}")
    scale = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
    parameters = _read_parameters(values.get("target_parameters"))
    targets = _read_targets(values.get("target_modules"), may_be_none=bool(parameters))
    version = _VERSION.fullmatch(str(values.get("peft_version")))
    numbers = None if version is None else (int(version[1]), int(version[2]), int(version[3]))
    return AdapterConfig(rank, scale, targets, parameters, numbers)


def refuse(reason: str) -> BadRequestError:
    """Return the error of an adapter that is not served."""
    return BadRequestError(f"The adapter cannot be loaded: {reason}.", PARAM)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError) as error:
        raise refuse(f"{path.name} cannot be read") from error
    if data is None:
        raise refuse(f"there is no {path}, or it is larger than {_MAX_BYTES} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{path.name} is no JSON object") from error
    if not isinstance(values, dict):
        raise refuse(f"{path.name} is no JSON object")
    return values


def _read_parameters(names: object) -> frozenset[str]:
    if names is None:
        return frozenset()
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise refuse(f"target_parameters must be a list of names, got {_show(names)}")
    return frozenset(names)


def _read_targets(targets: object, *, may_be_none: bool) -> frozenset[str] | None:
    if may_be_none and (targets is None or targets == []):
        return frozenset()
    if isinstance(targets, str) and targets:
        return None
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise refuse(f"target_modules must be a list of names or a text, got {_show(targets)}")
    return frozenset(targets)


def _show(value: object) -> str:
    return repr(value)[:80]
