# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
"""What the steps of a model launch on a GPU, found out without one: tensors have no memory, launches are noted.

The real decoder runs on tensors without memory that say they are a GPU's, and what asks for the GPU is told of an H100.
What is timed at boot is noted with all its candidates, in the order in which they would be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from blink.kernels.gpu import arguments, launch, tensor_map

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    multi_processor_count=132,
    major=9,
    minor=0,
    L2_cache_size=50 << 20,
    shared_memory_per_multiprocessor=228 << 10,
    shared_memory_per_block_optin=227 << 10,
    total_memory=79 << 30,
)
_MAP_BYTES = 128
_PRODUCTS = (functional.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch._scaled_mm)  # pyright: ignore[reportPrivateImportUsage]
_IS_CUDA, _DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
_DEVICE_OF_ALL = torch.device("cuda", 0)


class _Names(set[tuple[str, str]]):
    """Takes the place of the names that compile_ahead() gathers."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def add(self, element: tuple[str, str]) -> None:
        """Note a kernel's name."""
        self._note(element[0].replace("blink::", ""))


class _NoGenerator:
    """Takes the place of a generator: nothing is filled."""

    def __init__(self, device: torch.device) -> None:
        """Take a device."""

    def manual_seed(self, seed: int) -> None:
        """Take a seed."""


class _Cuda(TorchFunctionMode):
    """Lets tensors of PyTorch's device without memory pass for CUDA's, and notes the GEMMs that PyTorch computes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch's."""
        if func == _IS_CUDA:
            return True
        if func == _DEVICE:
            return _DEVICE_OF_ALL
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = [_on_meta(arg) for arg in args], {name: _on_meta(arg) for name, arg in (kwargs or {}).items()}
        if func in _PRODUCTS:
            operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self._note(f"torch.{func.__name__} {' by '.join('x'.join(map(str, each.shape)) for each in operands)}")
        return func(*args, **kwargs)


def _on_meta(argument: Any) -> Any:
    if isinstance(argument, torch.device | str) and str(argument).startswith("cuda"):
        return torch.device("meta")
    return argument


def _describe(function: JITFunction[Any], options: dict[str, Any]) -> str:
    """Return a Triton kernel's name with the constants that it is compiled for."""
    constants = {name: value for name, value in options.items() if name.isupper() or name.startswith("num_")}
    shown = ", ".join(f"{name}={getattr(value, 'value', value)}" for name, value in sorted(constants.items()))
    return f"{function.fn.__module__.removeprefix('blink.kernels.gpu.')}.{function.fn.__name__}({shown})"


@contextmanager
def pretended_gpu(note: Callable[[str], None], gpu: SimpleNamespace = H100) -> Iterator[None]:
    """Within it, tensors of a CUDA device can be made and computed with, and what is launched is noted."""
    cuda = {
        "get_device_capability": lambda *_: (gpu.major, gpu.minor),
        "get_device_properties": lambda *_: gpu,
        "get_device_name": lambda *_: gpu.name,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (gpu.total_memory, gpu.total_memory),
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
    }

    def run(self: JITFunction[Any], *_: object, grid: object, warmup: bool, **options: object) -> None:
        del grid, warmup
        note(_describe(self, options))

    forget = vars(arguments)["_packing"].cache_clear  # packers keep what finds addresses
    forget()
    with ExitStack() as stack:
        stack.callback(forget)
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch._C, "_set_sm_carveout_experimental", lambda _: None, create=True))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(launch, "_wanted", _Names(note)))
        stack.enter_context(patch.object(tensor_map, "_encode", lambda *_: bytes(_MAP_BYTES)))
        stack.enter_context(patch.object(arguments, "_address", lambda _: 0))
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(torch, "Generator", _NoGenerator))
        stack.enter_context(_Cuda(note))
        yield


def fold(lines: list[str]) -> str:
    """Write lines one behind the other, runs that repeat once, with how often: those of equal layers."""
    folded: list[str] = []
    start = 0
    while start < len(lines):
        length, count = _longest_repeat(lines, start)
        part = " ".join(lines[start : start + length])
        folded.append(f"{count} x ({part})" if count > 1 else part)
        start += length * count
    return " ".join(folded)


def _longest_repeat(lines: list[str], start: int, most: int = 64) -> tuple[int, int]:
    """Return the length of what repeats from a line on, and how often; of several the one that covers the most."""
    best = 1, 1
    for length in range(1, min(most, (len(lines) - start) // 2) + 1):
        part, count = lines[start : start + length], 1
        while lines[start + count * length : start + (count + 1) * length] == part:
            count += 1
        if count > 1 and length * count > best[0] * best[1]:
            best = length, count
    return best
