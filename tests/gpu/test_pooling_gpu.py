# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores of the GPU engine, whose host is not asked for any step, against transformers on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blink.kernels.batch import Batch, Header
from blink.kernels.pooling import Pooler
from embeddings_check import check_embeddings, check_scores

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_embeddings_are_transformers(tmp_path: Path, mode: str) -> None:
    check_embeddings(tmp_path, mode, 1e-5, dtype="float32")


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_embeddings_in_bfloat16_are_near_transformers(tmp_path: Path, mode: str) -> None:
    check_embeddings(tmp_path, mode, 0.03, dtype="bfloat16")


@pytest.mark.parametrize("converted", [False, True])
def test_scores_are_transformers(tmp_path: Path, converted: bool) -> None:
    check_scores(tmp_path, 1e-5, converted=converted, dtype="float32")


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_pooling_runs_in_a_graph_and_as_on_the_cpu(kind: str) -> None:
    """A captured graph does with other batches what the CPU does: nothing of it depends on the captured one."""
    torch.manual_seed(0)
    rows, tokens, hidden_size = 4, 32, 64
    sizes: Any = {"max_tokens": tokens, "max_rows": rows, "num_slots": 6, "max_blocks": 1, "max_model_len": 99}
    batch = Batch.allocate(**sizes, device="cuda", vector_floats=hidden_size)
    hidden = torch.zeros(tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
    pooler, reference = Pooler(kind, None), Pooler(kind, None)
    pooler.pool(hidden, batch, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooler.pool(hidden, batch, rows)
    for chunks in ([(2, 0, 10), (0, 0, 5)], [(0, 5, 20)], [(2, 10, 1), (5, 0, 3), (0, 0, 2), (1, 0, 9)]):
        other = Batch.allocate(**sizes, vector_floats=hidden_size)
        token = 0
        for row, (slot, first, count) in enumerate(chunks):
            other.row_slots[row], other.query_starts[row], other.context_lens[row] = slot, token, first + count
            other.positions[token : token + count] = torch.arange(first, first + count)
            token += count
        other.query_starts[len(chunks) :] = token
        other.header[Header.NUM_ROWS] = len(chunks)
        for name in ("row_slots", "query_starts", "context_lens", "positions", "header"):
            getattr(batch, name).copy_(getattr(other, name))
        hidden.copy_(torch.randn(tokens, hidden_size))
        graph.replay()
        reference.pool(hidden.cpu(), other, rows)
        torch.testing.assert_close(batch.vectors[: len(chunks)].cpu(), other.vectors[: len(chunks)])
        assert batch.sampled_tokens[: len(chunks)].tolist() == [0] * len(chunks)
