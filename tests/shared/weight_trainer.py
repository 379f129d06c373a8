# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A trainer that broadcasts the weights of a model's directory, in a process of its own.

    python weight_trainer.py FOLDER PORT [NUMBER]

It makes its group as SGLang's init_custom_process_group() does. With a number it ends after so many tensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

GROUP = "weight_update_group"


def list_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's directory."""
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def describe_weights(folder: Path) -> dict[str, list[Any]]:
    """Return names, types and shapes, as SGLang's body of /update_weights_from_distributed has them."""
    weights = list_weights(folder)
    shapes = [list(one.shape) for one in weights.values()]
    return {"names": [*weights], "dtypes": [str(one.dtype) for one in weights.values()], "shapes": shapes}


def start_trainer(folder: Path, port: int, *number: int) -> subprocess.Popen[bytes]:
    """Start a trainer of two ranks, whose store listens at a port."""
    return subprocess.Popen([sys.executable, __file__, str(folder), str(port), *map(str, number)])


def main(folder: str, port: str, number: str = "") -> None:
    timeout = timedelta(seconds=120)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    store.set_timeout(timeout)
    prefix = dist.PrefixStore(GROUP, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], "gloo", prefix, group_name=GROUP, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
    for count, tensor in enumerate(list_weights(Path(folder)).values()):
        if number and count == int(number):
            os._exit(9)
        dist.broadcast(tensor, src=0, group=group)


if __name__ == "__main__":
    main(*sys.argv[1:])
