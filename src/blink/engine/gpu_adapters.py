# SPDX-License-Identifier: Apache-2.0
"""The adapters of a GPU engine, and the graph by which its scheduler copies them to the GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from blink.engine.device_scheduler import DeviceScheduler
from blink.errors import ConfigError
from blink.kernels.gpu.lora.memory import GpuAdapters, count_numbers
from blink.kernels.gpu.lora.paging import copy_ordered
from blink.kernels.gpu.lora.upload import Uploader
from blink.kernels.lora import WeightParts
from blink.lora_config import LoraConfig
from blink.models.decoder import Decoder
from blink.runner.adapters import Adapters


def make_gpu_adapters(lora: LoraConfig, model: Decoder, weights: Mapping[int, WeightParts]) -> GpuAdapters:
    """Return the memory of adapters on the GPU of a model, or of a rank's part of it; weights: by identity.

    Raises:
        ConfigError: there is no memory for them.
    """
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    try:
        with _on(model.device):
            upload = Uploader() if lora.num_adapters <= lora.max_loras else None
            return GpuAdapters(weights, lora.num_adapters, lora.max_loras, lora.max_lora_rank, like, upload)
    except torch.OutOfMemoryError as error:
        size, of_experts = (
            count_numbers(some, lora.max_lora_rank) * lora.max_loras * like.element_size()
            for some in (weights, {key: parts for key, parts in weights.items() if parts.experts})
        )
        raise ConfigError(
            f"there is no GPU memory for the adapters, which take {size} bytes, {of_experts} of them for experts: lower"
            " --max-loras or --max-lora-rank"
        ) from error


def capture_copies(scheduler: DeviceScheduler, stores: Sequence[Adapters], order: Tensor) -> None:
    """Let the scheduler copy adapters by its order, csrc's CopyOrder: int32 [4]; nothing where it never will.

    stores: of all ranks; the scheduler's GPU also writes the parts of the others, into their memory.
    """
    places = [store.places for store in stores if isinstance(store, GpuAdapters) and store.is_paged]
    if not places:
        return
    copy_ordered(places, order)  # loads the kernels; nothing is ordered yet
    torch.cuda.synchronize()
    scheduler.capture_copy(functools.partial(copy_ordered, places, order))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Within it the device is the current one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
