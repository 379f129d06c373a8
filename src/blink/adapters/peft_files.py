# SPDX-License-Identifier: Apache-2.0
"""An adapter's folder, as PEFT writes it: each tensor is checked against the model before it is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from blink.adapters.modules import Module
from blink.adapters.peft_config import AdapterConfig, read_config, refuse
from blink.errors import BadRequestError
from blink.fields import one_line
from blink.kernels.lora import LowRank, Updates

_FILE = "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\.(?:|model\.|decoder\.|model\.decoder\.|language_model\.model\.|model\.language_model\.)"
    r"(layers\.\d{1,4}\.[\w.]{1,100})\.lora_([AB])(?:\.default)?\.weight"
)
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory."""

    updates: Updates
    content: bytes  # the digest of all that its results depend on
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Pair:
    """The names of the two tensors of a module."""

    down: str
    up: str


def read_adapter(folder: Path, ranks: Sequence[Mapping[str, Module]], max_rank: int, like: Tensor) -> Adapter:
    """Read an adapter of a model's modules into tensors of the type and device of another.

    ranks: the modules of each rank, of which each gets its part.

    Raises:
        BadRequestError: a file is damaged, does not fit the model or asks for what is not done here; the message names
            the tensor.
    """
    config = read_config(folder, max_rank)
    path = folder / _FILE
    if not path.is_file():
        has_pickle = (folder / "adapter_model.bin").is_file()
        reason = "adapter_model.bin is not read: save it as safetensors" if has_pickle else f"there is no {path}"
        raise refuse(reason)
    try:
        with safe_open(path, framework="pt") as file:
            return _read(file, config, ranks, like)
    except BadRequestError:
        raise
    except Exception as error:  # the library's error type is not public
        raise refuse(f"{_FILE} is damaged ({one_line(error)})") from error


def _read(file: Any, config: AdapterConfig, ranks: Sequence[Mapping[str, Module]], like: Tensor) -> Adapter:
    pairs = _pair_names(file.keys(), ranks[0])
    _check_targets(config, pairs)
    for name, pair in pairs.items():
        out_size, in_size = ranks[0][name].file_shape
        _check_tensor(file, pair.down, (config.rank, in_size))
        _check_tensor(file, pair.up, (out_size, config.rank))
    digest = blake2b(f"{config.scale!r}".encode(), digest_size=_HASH_BYTES)
    found: defaultdict[int, list[LowRank]] = defaultdict(list)
    for name, pair in sorted(pairs.items()):
        down, up = (_read_tensor(file, tensor) for tensor in (pair.down, pair.up))
        for tensor in (down, up):
            digest.update(f"{name}:{tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        up = up.float().mul_(config.scale)
        for module in (modules[name] for modules in ranks):
            placed = (tensor.to(like.device, like.dtype).contiguous() for tensor in module.take(down, up))
            found[id(module.weight)].append(LowRank(module.rows, *placed))
    updates = {weight: tuple(each) for weight, each in found.items()}
    return Adapter(updates, digest.digest(), _count_bytes(updates.values()))


def _pair_names(names: Iterable[str], modules: Mapping[str, Module]) -> dict[str, _Pair]:
    """Return both tensors of each module that a file changes."""
    halves: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise refuse(f"{_shorten(name)} is no tensor of a LoRA adapter that is served here")
        module, half = match.groups()
        if module not in modules:
            raise refuse(f"{_shorten(name)} belongs to no module that takes an adapter in this model")
        if half in halves[module]:
            raise refuse(f"{_shorten(name)} is there twice")
        halves[module][half] = name
    if not halves:
        raise refuse(f"{_FILE} has no tensor")
    for each in halves.values():
        if len(each) < 2:
            raise refuse(f"{_shorten(*each.values())} is there without its other half")
    return {module: _Pair(each["A"], each["B"]) for module, each in halves.items()}


def _check_targets(config: AdapterConfig, pairs: Mapping[str, _Pair]) -> None:
    """Refuse tensors that target_modules does not name, and names in it without tensors."""
    if config.targets is None:
        return
    found = {name: {target for target in config.targets if _is_end(name, target)} for name in pairs}
    for name, targets in found.items():
        if not targets:
            raise refuse(f"{_shorten(pairs[name].down)} is of no module among target_modules")
    if missing := config.targets.difference(*found.values()):
        raise refuse(f"target_modules has {_shorten(min(missing))}, of which there is no tensor")


def _is_end(module: str, target: str) -> bool:
    return f".{module}".endswith(f".{target}")


def _check_tensor(file: Any, name: str, shape: tuple[int, int]) -> None:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise refuse(f"{name} has the shape {list(stored.get_shape())}, and must have {list(shape)}")
    if stored.get_dtype() not in _TYPES:
        raise refuse(f"{name} is of the type {stored.get_dtype()}, and must be one of {', '.join(_TYPES)}")


def _read_tensor(file: Any, name: str) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    if not tensor.isfinite().all():
        raise refuse(f"{name} holds numbers that are not finite")
    return tensor


def _count_bytes(updates: Iterable[Iterable[LowRank]]) -> int:
    return sum(tensor.nbytes for each in updates for update in each for tensor in (update.down, update.up))


def _shorten(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}...")
