# SPDX-License-Identifier: Apache-2.0
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""A trainer that broadcasts the weights of a model's directory, or shares them on a GPU, in a process of its own.

    python weight_trainer.py broadcast FOLDER PORT BACKEND [NUMBER]
    python weight_trainer.py share FOLDER

It makes its group as SGLang's init_custom_process_group() does. With a number it ends after so many tensors. What it
shares it describes as vLLM's trainers do, until its input ends.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import reduce_tensor

GROUP = "weight_update_group"


def list_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's directory."""
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def describe_weights(folder: Path) -> dict[str, list[Any]]:
    """Return names, types and shapes, as SGLang's body of /update_weights_from_distributed has them."""
    weights = list_weights(folder)
    shapes = [list(one.shape) for one in weights.values()]
    return {"names": [*weights], "dtypes": [str(one.dtype) for one in weights.values()], "shapes": shapes}


def start_trainer(folder: Path, port: int, *number: int, backend: str = "gloo") -> subprocess.Popen[bytes]:
    """Start a trainer of two ranks, whose store listens at a port; with nccl it has the last GPU."""
    arguments = "broadcast", str(folder), str(port), backend, *map(str, number)
    return subprocess.Popen([sys.executable, __file__, *arguments])


@dataclass(frozen=True)
class Shared:
    """What a trainer says of tensors that it shares."""

    tensors: list[tuple[str, str, list[int]]]
    pickled: str


@contextmanager
def share_weights(folder: Path) -> Iterator[Shared]:
    """Have a trainer on the first GPU, with the weights of a model's directory."""
    command = [sys.executable, __file__, "share", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        yield Shared(**json.loads(trainer.stdout.readline()))


def share(folder: str) -> None:
    weights = {name: one.cuda() for name, one in list_weights(Path(folder)).items()}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    pickled = pickle.dumps([{uuid: reduce_tensor(one)} for one in weights.values()])
    tensors = [(name, str(one.dtype), list(one.shape)) for name, one in weights.items()]
    print(json.dumps({"tensors": tensors, "pickled": base64.b64encode(pickled).decode()}), flush=True)
    sys.stdin.read()


def broadcast(folder: str, port: str, backend: str, number: str = "") -> None:
    timeout = timedelta(seconds=120)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    store.set_timeout(timeout)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        torch.cuda.set_device(device)
    prefix = dist.PrefixStore(GROUP, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], backend, prefix, group_name=GROUP, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
    for count, tensor in enumerate(list_weights(Path(folder)).values()):
        if number and count == int(number):
            os._exit(9)
        dist.broadcast(tensor.to(device), src=0, group=group)
    if backend == "nccl":
        torch.cuda.synchronize()
    dist.destroy_process_group(group)  # an interpreter that ends with a group may abort in gloo's threads


if __name__ == "__main__":
    {"broadcast": broadcast, "share": share}[sys.argv[1]](*sys.argv[2:])
