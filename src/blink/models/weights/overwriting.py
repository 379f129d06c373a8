# SPDX-License-Identifier: Apache-2.0
"""Newer weights in the memory of a model's own, which captured graphs read: values change, and nothing else may.

A model is read part by part, so that no more than the largest part exists twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.base import QuantizedEmbedding, QuantizedWeight
from blink.models.decoder import Decoder
from blink.models.weights.checkpoint import Checkpoint, GgufCheckpoint
from blink.models.weights.quantized_checkpoint import MatrixCheckpoint


class PartCheck:
    """Compares parts that were loaded with a model's own; for DecoderLoader's `place`."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def __call__(self, name: str, part: Any) -> Any:
        """Return the model's own part of that name.

        Raises:
            ConfigError: the other differs in more than its values.
        """
        own = _find_part(self._model, name)
        self.take([*_pair_tensors(name, own, part)])
        return own

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Do with the tensors of a part, own and other, what the class is for."""


class Overwrite(PartCheck):
    """Writes the values of parts that were loaded over those of a model's own."""

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the values, once all tensors of the part were compared."""
        for own, other in pairs:
            own.copy_(other)


class UnreadCheckpoint:
    """A checkpoint whose tensors are found and compared; values are read only of what is stored in another form."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.norm_shift, self.keeps_groups = source.norm_shift, source.keeps_groups
        self.stored_rows: GgufCheckpoint | None = source.stored_rows

    @property
    def matrices(self) -> MatrixCheckpoint | None:
        """As the source has it."""
        return self._source.matrices

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check that there is a tensor of that name and shape."""
        self._source.check(name, shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Write zeros, which stand for values that are not read."""
        del name
        target.zero_()

    def read_quantized(self, names: Sequence[str], order: Sequence[Tensor] | None = None) -> QuantizedEmbedding | None:
        """Return matrices as stored."""
        return self._source.read_quantized(names, order)


def _find_part(model: Decoder, name: str) -> Any:
    """Return what DecoderLoader calls so."""
    field, _, index = name.partition(".")
    part = getattr(model, field)
    return part[int(index)] if index else part


def _pair_tensors(name: str, own: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of a part beside those that are to stand for them.

    Raises:
        ConfigError: the parts differ in something else than the values of tensors.
    """
    if own is other:
        return
    if type(own) is not type(other):
        raise _refuse(name, type(own).__name__, type(other).__name__)
    match own:
        case Tensor():
            if _form_of(own) != _form_of(other):
                raise _refuse(name, _form_of(own), _form_of(other))
            yield own, other
        case QuantizedWeight() | tuple() | list():
            yield from _pair_items(name, _list_items(own), _list_items(other))
        case _ if is_dataclass(own):
            yield from _pair_items(name, _list_items(own), _list_items(other))
        case _ if own != other:
            raise _refuse(name, own, other)
        case _:
            pass


def list_tensors(part: Any) -> Iterator[Tensor]:
    """Yield the tensors of a part of a model."""
    match part:
        case Tensor():
            yield part
        case QuantizedWeight() | tuple() | list():
            yield from (one for item in _list_items(part).values() for one in list_tensors(item))
        case _ if is_dataclass(part):
            yield from (one for item in _list_items(part).values() for one in list_tensors(item))
        case _:
            pass


def _pair_items(name: str, own: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    if own.keys() != other.keys():
        raise _refuse(name, f"{len(own)} parts", f"{len(other)}")
    for key, item in own.items():
        yield from _pair_tensors(f"{name}.{key}", item, other[key])


def _list_items(part: Any) -> dict[str, Any]:
    """Return what a part consists of, by name."""
    if is_dataclass(part):
        return {field.name: getattr(part, field.name) for field in fields(part)}
    match part:
        case QuantizedWeight():
            return vars(part)
        case _:
            return {str(index): item for index, item in enumerate(part)}


def _form_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device, tuple[int, ...]]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride()


def _refuse(name: str, own: object, other: object) -> ConfigError:
    return ConfigError(
        f"The new weights differ in their form: '{name}' is {own} here, and would be {other}. Weights of the same "
        "format, types and scales fit; for others start the engine anew."
    )
