# SPDX-License-Identifier: Apache-2.0
"""Streams of tensors: what they hold is told before their values, and what is malformed or does not fit is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from blink.errors import BadRequestError
from blink.models.weights.staged_tensors import StagedTensors
from blink.offline.tensors import stream_tensors
from blink.region.tensor_stream import TensorEntry, read_chunks, read_header, write_header

OWN = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int8), "c": torch.ones(1)}


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[StagedTensors]:
    save_file(OWN, tmp_path / "model.safetensors")
    staged = StagedTensors(tmp_path)
    yield staged
    staged.close()


def stream_of(header: Any, data: bytes = b"") -> io.BytesIO:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return io.BytesIO(len(text).to_bytes(8, "little") + text + data)


def field(dtype: Any = "F32", shape: Any = (1,), ends: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": ends}


def read(staged: StagedTensors) -> dict[str, torch.Tensor]:
    """Return the newest of each tensor that has come."""
    return {name: tensor for path in staged.files for name, tensor in load_file(path).items()}


def test_the_librarys_streams_are_read_and_ours_are_read_by_it(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(3, 5).to(torch.bfloat16), "y": torch.tensor(7), "z": torch.zeros(0, 4)}
    stream = io.BytesIO(save(tensors))
    entries = read_header(stream)
    assert {entry.name: entry.shape for entry in entries} == {"x": (3, 5), "y": (), "z": (0, 4)}
    assert sum(len(piece) for entry in entries for piece in read_chunks(stream, entry.num_bytes)) == 38
    path = tmp_path / "ours.safetensors"
    path.write_bytes(b"".join(stream_tensors(tensors.items())))
    assert all(torch.equal(tensors[name], own) for name, own in load_file(path).items())
    own = {entry.name: (entry.dtype, entry.shape) for entry in read_header(path.open("rb"))}
    assert own == {"x": ("BF16", (3, 5)), "y": ("I64", ()), "z": ("F32", (0, 4))}


@pytest.mark.parametrize(
    "stream",
    [
        io.BytesIO(b""),
        io.BytesIO(b"\xff" * 40),
        stream_of(b"[]"),
        stream_of(b"{}"),
        stream_of(b"nothing"),
        stream_of(b"[" * 5000),
        stream_of({"a": field(dtype="pickle")}),
        stream_of({"a": field(dtype=["F32"])}),
        stream_of({"a": field(shape=(-1,))}),
        stream_of({"a": field(shape=(1 << 60,))}),
        stream_of({"a": field(shape=(1,) * 9)}),
        stream_of({"a": field(shape=(True,))}),
        stream_of({"a": field(ends=(0, 5))}),
        stream_of({"a": field(ends=(4, 8))}),
        stream_of({"a": field(), "b": field()}),
        stream_of({"a": field(ends="04")}),
        stream_of({"a": {}}),
        stream_of({"a": None}),
        stream_of({"": field()}),
    ],
)
def test_malformed_heads_are_refused(stream: io.BytesIO) -> None:
    with pytest.raises(BadRequestError):
        read_header(stream)


def test_tensors_replace_those_of_their_names_and_superseded_files_go(staged: StagedTensors) -> None:
    staged.receive(io.BytesIO(save({"a": OWN["a"] + 1})))
    staged.receive(io.BytesIO(save({"b": OWN["b"] + 1, "a": OWN["a"].half() + 2})))
    assert torch.equal(read(staged)["a"], OWN["a"].half() + 2)
    staged.commit()
    assert len(staged.files) == 1 and not staged.has_waiting
    staged.receive(io.BytesIO(save({"c": OWN["c"] + 5})))
    staged.forget_waiting()
    assert [*read(staged)] == ["a", "b"] and len(staged.files) == 1


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a": torch.zeros(3, 2)}, "shape"),
        ({"b": torch.zeros(4)}, "type"),
        ({"a": torch.zeros(2, 3, dtype=torch.int8)}, "type"),
        ({"c": OWN["c"], "d": torch.ones(1)}, "no tensor 'd'"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_value_is_read(
    staged: StagedTensors, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    whole = save(tensors)
    stream = io.BytesIO(whole)
    with pytest.raises(BadRequestError, match=reason):
        staged.receive(stream)
    assert staged.files == []
    assert len(whole) - stream.tell() == sum(one.nbytes for one in tensors.values())


@pytest.mark.parametrize("lost", [1, 20])
def test_of_a_stream_that_ends_early_nothing_is_kept(staged: StagedTensors, lost: int) -> None:
    with pytest.raises(BadRequestError, match="ended early"):
        staged.receive(io.BytesIO(save({"a": OWN["a"], "c": OWN["c"]})[:-lost]))
    assert staged.files == [] and not staged.has_waiting


def test_a_trainers_name_for_the_tied_output_layer_is_passed_over(staged: StagedTensors) -> None:
    staged.receive(io.BytesIO(save({"c": OWN["c"] + 1, "lm_head.weight": torch.zeros(9)})))
    assert [*read(staged)] == ["c"]


def test_a_gguf_file_takes_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(BadRequestError, match="update_weights_from_disk"):
        StagedTensors(path)


def test_a_head_is_a_multiple_of_eight_bytes() -> None:
    for length in range(1, 20):
        assert len(write_header([TensorEntry("x" * length, "F32", (1,))])) % 8 == 0
