# SPDX-License-Identifier: Apache-2.0
"""The tensors of safetensors files by name, with those that hold several matrices taken apart.

So experts have the names of files with a tensor for each of their matrices, whatever the files are like.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from torch import Tensor

from blink.errors import ConfigError
from blink.fields import one_line
from blink.formats.schemes import GROUP
from blink.models.families import FAMILIES
from blink.models.spec import ModelSpec
from blink.models.weights.shards import list_shards

# A tensor of all experts; the last two are Granite's names.
_FUSED = re.compile(
    r"(.+\.(?:experts|block_sparse_moe))\.(gate_up_proj|down_proj|input_linear|output_linear)(|\.weight|_scale|_scale_inv)"
)
_DOWN = ("down_proj", "output_linear")
_RECURRENT_INPUT = re.compile(r"(?:.+\.)?layers\.(\d+)\.mamba\.in_proj\.weight")


class Stored(Protocol):
    """A tensor, or a part of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def read(self, entry: int | None = None) -> Tensor:
        """Return it as it is stored, or one entry of its first dimension."""
        ...


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of a file."""

    file: safe_open
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, entry: int | None = None) -> Tensor:
        """Return it, or one entry of its first dimension."""
        return self.file.get_tensor(self.name) if entry is None else self.file.get_slice(self.name)[entry]


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Some rows of an expert's matrix [out, in], out of a tensor of all, which may hold transposed ones."""

    whole: WholeTensor
    expert: int
    rows: slice
    columns: int
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.rows.stop - self.rows.start, self.columns

    def read(self, entry: int | None = None) -> Tensor:
        """Return it, or one of its rows."""
        stored = self.whole.file.get_slice(self.whole.name)
        if self.is_transposed:
            values = stored[self.expert, :, self.rows].T.contiguous()
        else:
            values = stored[self.expert, self.rows, :]
        return values if entry is None else values[entry]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a matrix."""

    whole: WholeTensor
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.rows.stop - self.rows.start, *self.whole.shape[1:]

    def read(self, entry: int | None = None) -> Tensor:
        """Return it, or one of its rows."""
        stored = self.whole.file.get_slice(self.whole.name)
        return stored[self.rows] if entry is None else stored[self.rows.start + entry]


def open_tensors(directory: Path, newer: Sequence[Path] = ()) -> dict[str, WholeTensor]:
    """Return the tensors of a directory's files, which stay open as long as these: they are mapped, not read.

    newer: files from elsewhere, whose tensors stand for those of the same names in files before them.

    Raises:
        ConfigError: a file is not readable.
    """
    tensors: dict[str, WholeTensor] = {}
    for path in (*list_shards(directory), *newer):
        try:
            shard = safe_open(path, framework="pt")
        except Exception as error:  # the library's error type is not public
            raise ConfigError(f"{path} is not a readable safetensors file ({one_line(error)}).") from error
        tensors |= {name: WholeTensor(shard, name) for name in shard.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


def split_tensors(tensors: Mapping[str, WholeTensor], spec: ModelSpec, place: str) -> dict[str, Stored]:
    """Return tensors with a name for each matrix, where a model's family may keep several together.

    Raises:
        ConfigError: scales of gate and up matrices cannot be told apart, or a tensor does not fit its layer.
    """
    names = FAMILIES[spec.architecture].experts
    found: dict[str, Stored] = dict(tensors)
    _split_recurrent(found, tensors, spec, place)
    if names is None or not names.fused or spec.mixture is None:
        return found
    for name, whole in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None or len(whole.shape) != 3:
            continue
        is_transposed = names.fused == "columns"
        if spec.mixture.size != spec.hidden_size:
            is_transposed = _is_transposed(tensors, match[1], spec)
        del found[name]
        ending = f".weight{match[3].removeprefix('.weight')}"
        block = f"{match[1].removesuffix('.experts')}.experts"
        for projection, rows in _name_rows(match, whole, spec.mixture.size, is_transposed, place):
            for expert in range(whole.shape[0]):
                part = ExpertPart(whole, expert, rows, whole.shape[1 if is_transposed else 2], is_transposed)
                found[f"{block}.{expert}.{projection}{ending}"] = part
    return found


def _split_recurrent(found: dict[str, Stored], tensors: Mapping[str, WholeTensor], spec: ModelSpec, place: str) -> None:
    """Name the parts of what Mamba-2 layers project: the gate, what is convolved, and the time steps."""
    for name, whole in tensors.items():
        match = _RECURRENT_INPUT.fullmatch(name)
        recurrence = spec.layers[int(match[1])].mixer.recurrence if match and int(match[1]) < spec.num_layers else None
        mixer = None if recurrence is None else recurrence.mamba
        if mixer is None:
            continue
        if len(whole.shape) != 2 or whole.shape[0] != mixer.in_size + mixer.num_gates:
            raise ConfigError(f"{place}: '{name}' has shape {whole.shape}, which does not fit the model's description.")
        del found[name]
        ends = (0, mixer.out_size, mixer.in_size, whole.shape[0])
        for part, start, end in zip(("z", "xbc", "dt"), ends, ends[1:], strict=False):
            found[name.replace("in_proj", f"in_proj_{part}")] = RowPart(whole, slice(start, end))


def _is_transposed(tensors: Mapping[str, WholeTensor], prefix: str, spec: ModelSpec) -> bool:
    """Tell by the shape of the downs: that of gate-up matrices does not where the hidden size is twice the other."""
    assert spec.mixture is not None
    down = next(
        (found for name in _DOWN for end in ("", ".weight") if (found := tensors.get(f"{prefix}.{name}{end}"))), None
    )
    return down is not None and down.shape[1:] == (spec.mixture.size, spec.hidden_size)


def _name_rows(
    match: re.Match[str], whole: WholeTensor, size: int, is_transposed: bool, place: str
) -> Iterator[tuple[str, slice]]:
    """Yield the projections that a tensor of all experts holds, and which rows of an expert's matrix are each one's."""
    rows = whole.shape[2 if is_transposed else 1]
    has_scales = match[3].startswith("_scale")
    if match[2] in _DOWN:
        yield "down_proj", slice(0, rows)
        return
    half = rows // 2
    if has_scales and rows == 1:  # one scale for both
        yield from (("gate_proj", slice(0, 1)), ("up_proj", slice(0, 1)))
        return
    if has_scales and rows != 2 * size and size % GROUP:
        raise ConfigError(f"{place}: '{whole.name}' has blocks that gate and up matrices share; use another model.")
    yield from (("gate_proj", slice(0, half)), ("up_proj", slice(half, 2 * half)))
