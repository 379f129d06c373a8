# SPDX-License-Identifier: Apache-2.0
"""A kernel of the GEMMs of decoding, chosen for a weight and a number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import TensorMap


@dataclass(frozen=True, slots=True)
class GemmKernel:
    """A kernel with what its launch must know of its tile config."""

    name: str
    tile: int  # weight rows of a block
    tokens: int  # of a block
    cluster: int
    threads: int
    stages: int  # of all of k
    shared_bytes: int

    def launch(
        self,
        blocks: int,
        operands: tuple[TensorMap, TensorMap],
        output: bytes,
        *,
        num_groups: int,
        groups: Tensor | None,
        update: bytes | None = None,
    ) -> None:
        """Launch so many blocks. operands: weight and activations; output: OutputArgs; update: UpdateArgs."""
        weight, x = operands
        arguments = args(
            "GemmArgs",
            weight=weight,
            x=x,
            output=output,
            stages=self.stages,
            num_groups=num_groups,
            groups=groups,
        )
        launch(
            compile_kernel(self.name),
            (blocks, 1),
            self.threads,
            arguments if update is None else args("UpdatedGemmArgs", gemm=arguments, update=update),
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
        )
