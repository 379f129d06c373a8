# SPDX-License-Identifier: Apache-2.0
"""A kernel of the GEMMs of decoding, chosen for a weight and a number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blink.kernels.gpu.arguments import args
from blink.kernels.gpu.launch import compile_kernel, launch
from blink.kernels.gpu.tensor_map import TensorMap


@dataclass(frozen=True, slots=True)
class GemmUpdate:
    """What a GEMM adds to its sums: those of the low-rank updates of its weight."""

    arguments: bytes  # UpdateArgs
    found: Tensor  # which these name: it must live until the launch


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
        update: GemmUpdate | None = None,
    ) -> None:
        """Launch so many blocks. operands: weight and activations; output: OutputArgs; update: for gemm.cuh's gemm."""
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
        name = self.name
        if update is not None:
            arguments = args("UpdatedGemmArgs", gemm=arguments, update=update.arguments)
            name = name.replace("::gemm<", "::gemm_updated<")
        launch(
            compile_kernel(name),
            (blocks, 1),
            self.threads,
            arguments,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
        )
