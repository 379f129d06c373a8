# SPDX-License-Identifier: Apache-2.0
"""SGLang's and vLLM's bodies of weights that a trainer broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from blink.errors import BadRequestError

GROUP: Final = "weight_update_group"
# PyTorch's names of types, by which trainers call them, and safetensors' names.
_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Names = Annotated[list[str], Field(min_length=1)]


class GroupInfo(BaseModel):
    """Where a trainer's group of processes meets; vLLM's init_info."""

    master_address: str = Field(min_length=1, max_length=253, description="where rank 0 keeps the group's store")
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, description="the engine's rank in the group")
    world_size: int = Field(ge=2, le=1 << 16)


class InitGroupBody(GroupInfo):
    """SGLang's body of /init_weights_update_group."""

    group_name: _Name = GROUP
    backend: Literal["gloo", "nccl"] = Field(description="an engine on a CPU has gloo alone")


class LeaveGroupBody(BaseModel):
    """SGLang's body of /destroy_weights_update_group."""

    group_name: _Name = GROUP


class BroadcastBody(BaseModel):
    """SGLang's body of /update_weights_from_distributed."""

    names: _Names
    dtypes: list[str] = Field(description="as PyTorch calls them")
    shapes: list[list[int]]
    group_name: _Name = GROUP
    flush_cache: bool = Field(default=True, description="whether cached prefixes are forgotten")
    abort_all_requests: bool = Field(
        default=False, description="whether open requests end; else those that run end first"
    )


class EndUpdateBody(BaseModel):
    """Blink's body of /end_weight_update and /finish_weight_update."""

    flush_cache: bool = Field(default=True, description="whether cached prefixes are forgotten")


class InitTransferBody(BaseModel):
    """vLLM's body of /init_weight_transfer_engine."""

    init_info: GroupInfo


class StartUpdateBody(BaseModel):
    """vLLM's body of /start_weight_update."""

    is_checkpoint_format: Literal[True] = Field(default=True, description="tensors are those of the model's files")


class UpdateInfo(BaseModel):
    """vLLM's update_info, of its NCCL backend, or of its IPC backend where handles come."""

    model_config = {"extra": "forbid"}

    names: _Names
    dtype_names: list[str] = Field(description="as PyTorch calls them")
    shapes: list[list[int]]
    packed: Literal[False] = Field(default=False, description="each tensor is broadcast by itself")
    ipc_handles_pickled: str | None = Field(default=None, description="base64; the pickle may hold handles alone")


class UpdateWeightsBody(BaseModel):
    """vLLM's body of /update_weights."""

    update_info: UpdateInfo


def list_tensors(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[tuple[str, str, Sequence[int]]]:
    """Return the name, type and shape of each tensor; types as safetensors calls them.

    Raises:
        BadRequestError: there are more of one than of another, or a type is unknown.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequestError("names, types and shapes must be as many as tensors.", "shapes")
    plain = [one.removeprefix("torch.") for one in dtypes]
    if unknown := [one for one in plain if one not in _DTYPES]:
        raise BadRequestError(f"Tensors are of {', '.join(_DTYPES)}, got {unknown[0][:64]!r}.", "dtypes")
    return [(name, _DTYPES[one], shape) for name, one, shape in zip(names, plain, shapes, strict=True)]
