# SPDX-License-Identifier: Apache-2.0
"""Write a quantized model as a Hugging Face directory, in the form of compressed-tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from blink.errors import ConfigError
from blink.formats.matrix import QuantizedMatrix
from blink.formats.registry import UNIT_FORMATS
from blink.formats.schemes import FP8_ROWS, Quantization, describe_group
from blink.models.weights.quantized_checkpoint import OUTPUT
from blink.quantize.config import QuantizeConfig

_MAX_SHARD_BYTES = 4 << 30


class ModelDirectory:
    """A new directory that takes tensors one by one, and keeps at most one shard of them in memory."""

    def __init__(self, path: Path) -> None:
        """Create the directory.

        Raises:
            ConfigError: it cannot be made, or there is something in it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            is_empty = not any(path.iterdir())
        except OSError as error:
            raise ConfigError(f"OUTPUT {path} cannot be created: {error.strerror}.") from error
        if not is_empty:
            raise ConfigError(f"OUTPUT {path} is not empty; name a new directory.")
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._num_bytes = 0
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor."""
        if self._num_bytes + tensor.nbytes > _MAX_SHARD_BYTES and self._tensors:
            self._flush()
        self._tensors[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def add_matrix(self, name: str, matrix: QuantizedMatrix) -> None:
        """Take a quantized matrix, whose name ends in .weight."""
        for ending, tensor in UNIT_FORMATS[matrix.format].compress(matrix).items():
            self.add(f"{name.removesuffix('.weight')}.{ending}", tensor)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a file beside the tensors."""
        (self.path / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file beside the tensors as it is."""
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)

    def finish(self) -> int:
        """Write what is left, and the index if there are several files; return the tensors' bytes."""
        self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self.path / "model.safetensors")
            return self._total_bytes
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05}-of-{len(self._shards):05}.safetensors"
            self._shard_path(index).rename(self.path / final)
            weight_map |= dict.fromkeys(names, final)
        metadata = {"total_size": self._total_bytes}
        self.write_json("model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
        return self._total_bytes

    def _flush(self) -> None:
        try:
            save_file(self._tensors, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        except Exception as error:  # the library's error type is not public
            raise ConfigError(f"OUTPUT {self.path} cannot be written: {error}.") from error
        self._shards.append(list(self._tensors))
        self._tensors, self._num_bytes = {}, 0

    def _shard_path(self, index: int) -> Path:
        return self.path / f"part-{index}.safetensors.tmp"


def describe_quantization(config: QuantizeConfig, group: int, others: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of a config.json; others: layers that stay as they are."""
    fp8, int4 = describe_group(FP8_ROWS), describe_group(Quantization("packed", group=group))
    groups = [fp8 if config.format == "fp8" else int4]
    output = [OUTPUT.removesuffix(".weight")]
    rounded, kept = (output, []) if config.quantize_lm_head else ([], output)
    ends = [*config.fp8_matrices, *rounded]
    if config.format == "int4" and ends:
        groups.append(fp8 | {"targets": [f"re:.*{re.escape(end)}$" for end in ends]})
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": [*kept, *others],
        "config_groups": {f"group_{index}": one for index, one in enumerate(groups)},
    }
