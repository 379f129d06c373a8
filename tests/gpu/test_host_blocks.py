# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks between the KV cache and the host's memory, against the same copies one after the other."""

from __future__ import annotations

import random

import pytest
import torch

from blink.models.weights.token_table import let_gpu_read
from triton_interpreter import IS_INTERPRETED

host_blocks = pytest.importorskip("blink.kernels.gpu.host_blocks")

RING = 16


@pytest.mark.parametrize("words", [16, 100, 4096, 5000])
@pytest.mark.parametrize(("first", "count"), [(0, 0), (3, 9), (13, 16), (-5, 12)])
def test_copies_are_made_in_their_order(device: torch.device, words: int, first: int, count: int) -> None:
    script = random.Random(words + count)
    draw = torch.Generator().manual_seed(words)
    cache = torch.randint(-(1 << 30), 1 << 30, (3, 6, words), dtype=torch.int32, generator=draw)
    host = torch.randint(-(1 << 30), 1 << 30, (3, 4, words), dtype=torch.int32, generator=draw)
    # So few blocks that most are written and then read by a later copy.
    copies = [(script.randrange(6), script.randrange(4), script.randrange(2)) for _ in range(RING)]
    expected, kept = cache.clone(), host.clone()
    for number in range(first, first + count):
        block, host_block, to_host = copies[number % RING]
        if to_host:
            kept[:, host_block] = expected[:, block]
        else:
            expected[:, block] = kept[:, host_block]
    own = cache.to(device)
    if not IS_INTERPRETED:
        let_gpu_read(host)
    bounds = torch.tensor([first, first + count], dtype=torch.int32, device=device)
    host_blocks.copy_listed(own, host, torch.tensor(copies, dtype=torch.int32, device=device), bounds)
    if not IS_INTERPRETED:
        torch.cuda.synchronize()
    assert torch.equal(own.cpu(), expected) and torch.equal(host, kept)
