# SPDX-License-Identifier: Apache-2.0
"""Tensors that a trainer has sent, in files, until the engine loads them over those of its model's directory.

Each tensor is compared with the model's files before anything of an update is kept. A part of an update that does not
come as a whole leaves nothing. Needs no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from io import BufferedIOBase
from pathlib import Path

from safetensors import safe_open

from blink.errors import BadRequestError, ConfigError
from blink.fields import one_line
from blink.models.weights.shards import OUTPUT_NAMES, list_shards
from blink.region.tensor_stream import (
    TensorEntry,
    check_distinct,
    read_chunks,
    read_header,
    write_header,
)

_WIDE = ("F16", "BF16", "F32", "F64")  # any of which the loader takes for any other
_MANY_NAMES = 5

ReadTensor = Callable[[TensorEntry], Iterable[bytes | memoryview]]


class StagedTensors:
    """The tensors of one model directory that were replaced, and those that are to be."""

    def __init__(self, directory: Path) -> None:
        """Take tensors for a model directory.

        Raises:
            BadRequestError: it is a GGUF file, or has no weights.
        """
        if directory.is_file():
            raise BadRequestError("An engine of a GGUF file takes whole files alone: POST /update_weights_from_disk.")
        self._wanted = _list_entries(directory)
        if not self._wanted:
            raise BadRequestError(f"{directory} has no weights that tensors could replace.")
        self._folder = tempfile.TemporaryDirectory(prefix="blink-weights-")
        self._number = 0
        self._waiting: list[tuple[Path, set[str]]] = []
        self._loaded: list[tuple[Path, set[str]]] = []

    @property
    def files(self) -> list[Path]:
        """The safetensors files that go over the directory's own, the newest last."""
        return [path for path, _ in (*self._loaded, *self._waiting)]

    @property
    def has_waiting(self) -> bool:
        """Whether something has come since the last commit()."""
        return bool(self._waiting)

    def receive(self, stream: BufferedIOBase) -> int:
        """Take a part of an update from a stream of safetensors; return how many tensors it held.

        Raises:
            BadRequestError: it is malformed, does not fit the model, or ends early; nothing of it is kept.
        """
        entries = read_header(stream)
        self.store(entries, lambda entry: read_chunks(stream, entry.num_bytes))
        return len(entries)

    def store(self, entries: Sequence[TensorEntry], read: ReadTensor) -> None:
        """Take a part of an update; read() is called for each tensor in turn.

        Raises:
            BadRequestError: a tensor does not fit the model, or read() refuses; nothing of the part is kept.
        """
        kept = self.check(entries)
        names = {entry.name for entry in kept}
        self._number += 1
        path = Path(self._folder.name) / f"{self._number:08}.safetensors"
        try:
            with path.open("wb") as file:
                file.write(write_header(kept))
                for entry in entries:
                    for piece in read(entry):
                        if entry.name in names:
                            file.write(piece)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise BadRequestError(f"The tensors cannot be kept in {path.parent}: {one_line(error)}.") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._waiting.append((path, names))

    def check(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Compare tensors with the model's; return those that the loader reads.

        Raises:
            BadRequestError: one does not fit.
        """
        check_distinct(entries)
        return [entry for entry in entries if self._is_kept(entry)]

    def forget_waiting(self) -> None:
        """Drop what has come since the last commit()."""
        for path, _ in self._waiting:
            path.unlink(missing_ok=True)
        self._waiting.clear()

    def commit(self) -> None:
        """Make what has come a part of the model's weights; files whose tensors came again are removed."""
        newer = set[str]()
        remaining = list[tuple[Path, set[str]]]()
        for path, names in reversed([*self._loaded, *self._waiting]):
            if names <= newer:
                path.unlink(missing_ok=True)
            else:
                remaining.append((path, names))
            newer |= names
        self._loaded, self._waiting = remaining[::-1], []

    def close(self) -> None:
        """Remove all files."""
        self._folder.cleanup()

    def _is_kept(self, entry: TensorEntry) -> bool:
        """Compare a tensor with the model's; return whether the model has it, and it is not its tied output layer."""
        wanted = self._wanted.get(entry.name)
        if wanted is None:
            if entry.name in OUTPUT_NAMES and self._wanted.keys().isdisjoint(OUTPUT_NAMES):
                return False  # a trainer's name for the embedding
            names = ", ".join([*self._wanted][:_MANY_NAMES])
            raise BadRequestError(f"The model's files have no tensor '{entry.name}'; they have {names}, and others.")
        if wanted.shape != entry.shape:
            raise BadRequestError(f"'{entry.name}' has shape {[*entry.shape]}, but the model's {[*wanted.shape]}.")
        are_wide = wanted.dtype in _WIDE and entry.dtype in _WIDE
        if wanted.dtype != entry.dtype and not are_wide:
            raise BadRequestError(f"'{entry.name}' has type {entry.dtype}, but the model's {wanted.dtype}.")
        return True


def _list_entries(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a directory's files by their names."""
    found = dict[str, TensorEntry]()
    for path in list_shards(directory):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    found[name] = TensorEntry(name, part.get_dtype(), tuple(part.get_shape()))
        except Exception as error:  # the library's error type is not public
            raise ConfigError(f"{path} is not a readable safetensors file ({one_line(error)}).") from error
    return found
