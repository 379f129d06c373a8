# SPDX-License-Identifier: Apache-2.0
"""Where the table of per-layer embeddings lies, of which a step reads a row for each token."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.models.spec import ModelSpec

_MAPPED = 2  # cudaHostRegisterMapped
_SHARE = 0.5  # of the free memory that all weights may take with the table: the rest is for keys and values


def choose_table_device(asked: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> torch.device:
    """Return in which device's memory the table is to lie. asked: what --per-layer-embeddings says.

    Raises:
        ConfigError: there is no such device.
    """
    if device.type == "cpu":
        if asked == "gpu":
            raise ConfigError("--per-layer-embeddings gpu: this engine runs on the CPU; leave it out.")
        return device
    if spec.layer_inputs is None or asked == "gpu":
        return device
    if asked == "auto" and count_bytes(spec, dtype) <= _SHARE * torch.cuda.mem_get_info(device)[0]:
        return device
    return torch.device("cpu")


def count_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return what a GPU keeps of all weights, the table's too."""
    scheme, quantized = spec.quantization, spec.num_matrix_weights
    saved = 0.0 if scheme is None else quantized * (dtype.itemsize - scheme.kept_bytes)
    return spec.num_parameters * dtype.itemsize - int(saved)


def let_gpu_read(table: Tensor, advice: str = "use --per-layer-embeddings gpu") -> None:
    """Lock a tensor of the host's memory as long as it is there, so that kernels can read and write it.

    Raises:
        ConfigError: it cannot be locked.
    """
    runtime = torch.cuda.cudart()
    assert runtime is not None
    status = int(runtime.cudaHostRegister(table.data_ptr(), table.nbytes, _MAPPED))
    if status != 0:
        raise ConfigError(
            f"{table.nbytes / 1e9:.1f} GB of the host's memory cannot be locked for the GPU (CUDA error {status}): "
            f"free memory, or {advice}."
        )
    freed = weakref.finalize(table, runtime.cudaHostUnregister, table.data_ptr())
    freed.atexit = False  # a process that ends unlocks all
