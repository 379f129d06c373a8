# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""Compiles kernels of csrc/kernels by name and launches them on torch's stream, which may be capturing.

A launch is pdl: the kernel may start before the one in front of it has ended, and waits for it inside.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode, Program, ProgramOptions

from blink.errors import ConfigError
from blink.kernels.gpu.device import has_clusters

_ROOT = Path(__file__).parents[2] / "csrc"
_DECODE = "decode.cu"
_ATTRIBUTE = driver.CUlaunchAttributeID


def compile_kernel(name: str, source: str = _DECODE) -> driver.CUfunction:
    """Return the kernel of a name such as "blink::gemv<1, 4096, ...>" for the current GPU; takes about a second.

    source: the file in csrc/kernels.
    """
    if _wanted is not None:
        _wanted.add((name, source))
        return driver.CUfunction()
    return _compile(name, source, torch.cuda.current_device())


def is_compiling_ahead() -> bool:
    """Tell whether launches are nothing but noted: within compile_ahead()."""
    return _wanted is not None


def compile_ahead(run: Callable[[], object]) -> None:
    """Compile on all cores the kernels that `run` launches. It runs without them, on what memory holds."""
    global _wanted
    _wanted = set()
    device = torch.cuda.current_device()
    try:
        run()
        wanted = [(*each, device) for each in _wanted]
    finally:
        _wanted = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: _compile(*each), wanted))


_wanted: set[tuple[str, str]] | None = None  # within compile_ahead(): names and sources


@functools.cache
def _compile(name: str, source: str, gpu: int) -> driver.CUfunction:
    """Return the kernel for a GPU of a number: each has functions of its own."""
    device = Device(gpu)
    device.set_current()
    code = _compile_once(f"sm_{device.arch}" + "a" * has_clusters(), name, source)
    kernel = check(driver.cuKernelGetFunction(driver.CUkernel(int(code.get_kernel(name).handle))))
    allow_shared_memory(kernel)
    return kernel


def allow_shared_memory(kernel: driver.CUfunction) -> None:
    """Let a launch ask for as much dynamic shared memory as a block can have beside the kernel's own."""
    attributes = driver.CUfunction_attribute
    own = check(driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel))
    most = Device().properties.max_shared_memory_per_block_optin - own
    check(driver.cuFuncSetAttribute(kernel, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most))


@functools.cache  # never freed: captured graphs use it
def _compile_once(arch: str, name: str, source: str) -> ObjectCode:
    return compile_code(arch, (name,), source)


def compile_code(arch: str, names: Sequence[str], source: str = _DECODE) -> ObjectCode:
    """Compile named kernels of a file in csrc/kernels for an architecture such as "sm_90a"; needs no GPU."""
    path = _ROOT / "kernels" / source
    options = ProgramOptions(name=path.name, std="c++20", arch=arch, include_path=[str(_ROOT)])
    return Program(path.read_text(), "c++", options).compile("cubin", name_expressions=tuple(names))


def launch(
    kernel: driver.CUfunction,
    grid: tuple[int, int],
    threads: int,
    arguments: bytes,
    *,
    cluster: int = 1,
    shared_bytes: int = 0,
    pdl: bool = True,
) -> None:
    """Launch a kernel that takes one struct. grid: in blocks; arguments: the struct's bytes; cluster: how many of a
    row of blocks work together."""
    if _wanted is not None:
        return
    config = driver.CUlaunchConfig()
    config.sharedMemBytes = shared_bytes
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream = torch.cuda.current_stream().cuda_stream
    attributes = []
    if cluster > 1:
        attributes.append(_attribute(_ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster))
    if pdl:
        attributes.append(_attribute(_ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
    config.attrs = attributes
    config.numAttrs = len(attributes)
    pointers = (ctypes.c_char_p * 1)(arguments)
    check(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


def _attribute(kind: driver.CUlaunchAttributeID, value: int) -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = kind
    if kind == _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = value, 1, 1
    else:
        attribute.value.programmaticStreamSerializationAllowed = value
    return attribute


def check(result: tuple[Any, ...]) -> Any:
    """Return what a driver call returns beside its status.

    Raises:
        ConfigError: the call failed.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorString(status)
        raise ConfigError(f"CUDA error {status.name}: {name.decode() if name else 'unknown'}")
    return values[0] if values else None
