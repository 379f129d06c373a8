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

from blink.adapters.fused import Shapes, is_end, is_straight, list_shapes, name_parameter, split
from blink.adapters.gathered import GatheredUpdates
from blink.adapters.module import Module
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
    modules = ranks[0]
    pairs = _pair_names(file.keys(), config, modules)
    _check_targets(config, pairs)
    straight = {name: _check_pair(file, pair, modules[name], config) for name, pair in pairs.items()}
    digest = blake2b(f"{config.scale!r}".encode(), digest_size=_HASH_BYTES)
    found = GatheredUpdates(like)
    for name, pair in sorted(pairs.items()):
        down, up = (_read_tensor(file, tensor) for tensor in (pair.down, pair.up))
        for tensor in (down, up):
            digest.update(f"{name}:{tensor.dtype}:{straight[name]}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        up = up.float().mul_(config.scale)
        for module in (modules[name] for modules in ranks):
            own = (down, up) if module.fused is None else split(module, down, up, straight=straight[name])
            if not found.add(module, *module.take(*own)):
                raise refuse(f"{_shorten(pair.down)} changes a matrix that another tensor changes, too")
    updates = found.finish()
    return Adapter(updates, digest.digest(), _count_bytes(updates.values()))


def _check_pair(file: Any, pair: _Pair, module: Module, config: AdapterConfig) -> bool:
    """Check the shapes of a module's tensors; return whether they are those of its matrices as they are."""
    straight = True
    if module.fused is None:
        out_size, in_size = module.file_shape
        shapes = Shapes((config.rank, in_size), (out_size, config.rank))
    else:
        forms = list_shapes(module, config.rank)
        stored = Shapes(*(tuple(file.get_slice(name).get_shape()) for name in (pair.down, pair.up)))
        fitting = [form for form, shapes in forms.items() if shapes == stored]
        found = is_straight(module, config) if len(fitting) > 1 else next(iter(fitting), True)
        if found is None:
            raise refuse(
                f"{_shorten(pair.down)} is of square matrices, and only a peft_version that was released says of which"
                " side: save it anew with PEFT 0.19.1 or a later one"
            )
        straight, shapes = found, forms[found]
    _check_tensor(file, pair.down, shapes.down)
    _check_tensor(file, pair.up, shapes.up)
    return straight


def _pair_names(names: Iterable[str], config: AdapterConfig, modules: Mapping[str, Module]) -> dict[str, _Pair]:
    """Return both tensors of each module that a file changes."""
    halves: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise refuse(f"{_shorten(name)} is no tensor of a LoRA adapter that is served here")
        module, half = name_parameter(match[1], config), match[2]
        if module not in modules:
            raise refuse(f"{_shorten(name)} belongs to no module that takes an adapter in this model")
        if modules[module].refusal:
            raise refuse(f"{_shorten(name)} belongs to a module that takes no adapter: {modules[module].refusal}")
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
    """Refuse tensors that no target names, and targets without tensors."""
    if config.targets is None:
        return
    targets = config.targets | config.parameters
    found = {name: {target for target in targets if is_end(name, target)} for name in pairs}
    for name, own in found.items():
        if not own:
            raise refuse(f"{_shorten(pairs[name].down)} is of no module among target_modules")
    for kind, names in (("target_modules", config.targets), ("target_parameters", config.parameters)):
        if missing := names.difference(*found.values()):
            raise refuse(f"{kind} has {_shorten(min(missing))}, of which there is no tensor")


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
