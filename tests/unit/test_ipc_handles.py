# SPDX-License-Identifier: Apache-2.0
"""Pickled handles of CUDA IPC: those that trainers send are read, and nothing else is, let alone run."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from blink.api.admin.ipc_handles import read_handles
from blink.engine.shared_tensors import check_handle
from blink.errors import BadRequestError
from blink.region.tensor_stream import TensorEntry

GPU = "8a3c5e1f-0000-1111-2222-333344445555"
ENTRY = TensorEntry("a", "BF16", (2, 3))


def make_handle(**changes: Any) -> tuple[Any, ...]:
    """Return what reduce_tensor() returns of a bfloat16 tensor [2, 3] on a GPU."""
    arguments: dict[str, Any] = {
        "tensor": torch.Tensor,
        "shape": torch.Size([2, 3]),
        "stride": (3, 1),
        "offset": 0,
        "storage": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "device": 0,
        "handle": b"c" + bytes(64),
        "num_bytes": 12,
        "offset_bytes": 512,
        "requires_grad": False,
        "counter": b"/torch_17_3_0",
        "counter_offset": 4,
        "event": bytes(64),
        "awaits_event": True,
    }
    return rebuild_cuda_tensor, tuple((arguments | changes).values())


def encode(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


@pytest.mark.parametrize(
    "changes",
    [{}, {"tensor": torch.nn.Parameter}, {"storage": torch.UntypedStorage}, {"shape": (2, 3)}],
    ids=["tensor", "parameter", "untyped", "tuple"],
)
def test_what_trainers_send_is_read(changes: dict[str, Any]) -> None:
    first, second = read_handles(encode([{GPU: make_handle(**changes)}, {GPU: make_handle(offset=6, num_bytes=24)}]), 2)
    handle = first[GPU]
    assert handle["handle"] == (b"c" + bytes(64)).hex() and bytes.fromhex(handle["counter"]) == b"/torch_17_3_0"
    assert (handle["shape"], handle["stride"], handle["offset_bytes"]) == ((2, 3), (3, 1), 512)
    assert handle["dtype"] == "bfloat16" and handle["awaits_event"] is True
    check_handle(ENTRY, handle)
    check_handle(ENTRY, second[GPU])


class Call:
    """Whose pickle calls something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def test_no_pickle_runs_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    calls = [Call(os.system, f"touch {marker}"), Call(eval, f"open({str(marker)!r}, 'w')"), Call(Path.touch, marker)]
    calls += [Call(partial, os.mkdir, marker), Call(getattr, "", "join"), Call(torch.load, str(marker))]
    for call in calls:
        for value in (call, [call], [{GPU: call}], [{GPU: make_handle(event=call)}]):
            with pytest.raises(BadRequestError, match="pickle is not read: it names"):
                read_handles(encode(value), 1)
    assert not marker.exists()


def test_a_word_is_never_called() -> None:
    """rebuild_cuda_tensor, and types, as what a pickle's opcodes would call."""
    calls = [Call(rebuild_cuda_tensor, *make_handle()[1]), Call(torch.Tensor, 3), Call(torch.UntypedStorage, 1 << 40)]
    for call in calls:
        with pytest.raises(BadRequestError, match="malformed"):
            read_handles(encode([{GPU: call}]), 1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "no list of 1"),
        ({GPU: make_handle()}, "no list of 1"),
        ([{}], "no GPUs"),
        ([{0: make_handle()}], "no GPUs"),
        ([{GPU: make_handle()[1]}], "no handle"),
        ([{GPU: (rebuild_cuda_tensor, (1, 2))}], "2 arguments, not 15"),
        ([{GPU: make_handle(shape=(2, "3"))}], "handle's shape"),
        ([{GPU: make_handle(num_bytes=True)}], "handle's num_bytes"),
        ([{GPU: make_handle(handle="c")}], "handle's handle"),
    ],
)
def test_other_pickles_are_refused_by_name(value: object, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason) as caught:
        read_handles(encode(value), 1)
    assert caught.value.param == "ipc_handles_pickled"


@pytest.mark.parametrize("text", ["", "%", "gASV", base64.b64encode(b"\x80\x05\x8e" + b"\xff" * 8).decode()])
def test_damaged_pickles_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="pickle is not read"):
        read_handles(text, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (3, 2)},
        {"dtype": torch.float16},
        {"num_bytes": 11},
        {"offset": 1},
        {"offset": -1},
        {"stride": (6, 1)},
        {"stride": (-3, 1)},
        {"stride": (3,)},
        {"offset_bytes": -512},
        {"counter": b"/etc/passwd"},
        {"counter": b"/torch_1_2_3/../x"},
        {"counter_offset": 10000},
        {"counter_offset": -1},
    ],
)
def test_a_handle_of_another_tensor_or_beyond_what_it_shares_is_not_opened(changes: dict[str, Any]) -> None:
    ((handle,),) = (one.values() for one in read_handles(encode([{GPU: make_handle(**changes)}]), 1))
    with pytest.raises(BadRequestError, match="'a'"):
        check_handle(ENTRY, handle)
