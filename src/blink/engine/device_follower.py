# SPDX-License-Identifier: Apache-2.0
"""What a GPU without a scheduler runs: the copy of the batch, and the kernel that follows plans."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from blink.engine.device_scheduler import DeviceArrays, DeviceScheduler
from blink.kernels.batch import Batch, Param, map_batch
from blink.kernels.gpu.comm.pull_batch import pull_batch
from blink.plan.site import Bucket
from blink.region.layout import FOLLOWER_PROGRAM, StepKind

_WORD_BYTES = 4
_OF_TOKENS = ("input_ids", "positions", "kv_slots", "window_kv_slots")
_OF_ROWS = ("context_lens", "row_slots", "state_sources", "state_targets", "state_lags")


class DeviceFollower(DeviceScheduler):
    """Capture a rank's step graphs, then start the kernel that launches those that the plan word names."""

    kernel = "blink_follower"
    threads = 1

    def __init__(self, arrays: DeviceArrays) -> None:
        """arrays: this GPU's, of which the model reads the batch."""
        super().__init__(arrays)
        self.plan_word = torch.zeros(1, dtype=torch.int64, device=arrays.memory.device)

    def _build_program(self) -> None:
        """Write csrc/device/program.h's FollowerProgram."""
        program = np.zeros(1, FOLLOWER_PROGRAM)
        program["plan_word"], program["graphs"] = self.plan_word.data_ptr(), self._build_table().data_ptr()
        program["outputs"] = [self._state.array_address(kind.array("output")) for kind in StepKind]
        self._program = self._upload(program)

    def read_failure(self) -> int:
        """Return the status of the launch that ended the kernel, a cudaError; 0: none failed. Waits for the GPU."""
        return int(self._program.cpu().numpy().view(FOLLOWER_PROGRAM)["failed"][0])


class PulledBatches:
    """The batches of one GPU, which its graphs copy from those of the scheduler's GPU."""

    def __init__(self, source: DeviceArrays, arrays: DeviceArrays, num_slots: int, block_size: int) -> None:
        """source: of the scheduler's GPU; arrays: the same of this one."""
        self._source, self._arrays, self._block_size = source, arrays, block_size
        self.batches = {kind: map_batch(arrays.array, num_slots, kind) for kind in StepKind}
        self._sources = {kind: map_batch(source.array, num_slots, kind) for kind in StepKind}
        self._spans: dict[tuple[StepKind, Bucket], torch.Tensor] = {}  # that captured graphs read

    def pull(self, kind: StepKind, size: Bucket) -> Batch:
        """Enqueue the copy of a step's batch; return it. Before a size is captured it has to run once."""
        key = kind, size
        if key not in self._spans:
            spans = torch.tensor([*self._list_spans(*key)], dtype=torch.int32)
            self._spans[key] = spans.to(self._arrays.memory.device)
        memory, batch, own = self._arrays.memory, self._sources[kind], self.batches[kind]
        sizes, param = (size.rows, self._block_size), int(Param.ADAPTER) if size.adapters else None
        pull_batch(self._source.memory, memory, self._spans[key], batch, own, *sizes, param)
        return own

    def _list_spans(self, kind: StepKind, size: Bucket) -> Iterable[tuple[int, int]]:
        """Yield what the model reads of a batch: its place in the arrays, and its length, in words."""
        batch = self.batches[kind]
        yield self._place(kind, "header"), batch.header.numel()
        yield self._place(kind, "query_starts"), size.rows + 1
        yield from ((self._place(kind, name), size.rows) for name in _OF_ROWS)
        for name in _OF_TOKENS:
            if getattr(batch, name).numel():
                yield self._place(kind, name), size.tokens
        if size.adapters:
            yield self._arrays.array_span("adapter_places")[0] // _WORD_BYTES, batch.adapter_places.numel()

    def _place(self, kind: StepKind, name: str) -> int:
        return self._arrays.array_span(kind.array(name))[0] // _WORD_BYTES
