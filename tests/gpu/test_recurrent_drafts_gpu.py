# SPDX-License-Identifier: Apache-2.0
"""Rows that verify drafts on recurrent layers, by the GPU's kernels, against the CPU's: outputs and what slots keep.

With TRITON_INTERPRET=1 they run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from blink.kernels.cpu import delta_rule as delta_reference
from blink.kernels.cpu import mamba as mamba_reference
from blink.kernels.delta_rule import DeltaWeights
from blink.kernels.layer_cache import StateCache
from blink.kernels.mamba import MambaWeights
from blink.kernels.recurrent import Rows
from blink.models.cache_layout import PerSequence
from triton_interpreter import IS_INTERPRETED

pytest.importorskip("triton")
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.kernels.gpu.recurrent import decode, mamba, prefill, verify

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
SLOTS, DRAFTS = 9, 3


class Kind(NamedTuple):
    """A kind of layers."""

    reference: Callable[..., Tensor]
    kernels: dict[str, Callable[..., Tensor]]
    weights: Any
    layer: PerSequence

    def project(self, tokens: int, dtype: torch.dtype) -> Any:
        """Return random projections."""
        channels, heads, width = self.layer.inputs[1], self.layer.state[0], self.layer.state[2]
        parts = (
            torch.randn(tokens, size, device=DEVICE).to(dtype) for size in (channels + heads * width, self.layer.gates)
        )
        return self.weights.project(*parts)

    def draw_cache(self, dtype: torch.dtype) -> StateCache:
        """Return slots of random states, and of what was kept of tokens."""
        shapes = replace(self.layer, rollback=DRAFTS).kept
        states = torch.randn(SLOTS, *self.layer.state, device=DEVICE)
        return StateCache(states, *(torch.randn(SLOTS, *shape, device=DEVICE).to(dtype) for shape in shapes))


def make_delta(dtype: torch.dtype) -> Kind:
    k_heads, v_heads, k_dim, v_dim = (1, 2, 16, 16) if IS_INTERPRETED else (16, 32, 128, 128)
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    vectors = (torch.rand(size, device=DEVICE) for size in (v_heads, v_heads, v_dim))
    rate, dt_bias, norm = vectors
    conv = (torch.randn(4, channels, device=DEVICE) * 0.5).to(dtype)
    weights = DeltaWeights(conv, -rate, dt_bias, norm, 1e-6, k_heads, k_dim)
    layer = PerSequence(state=(v_heads, k_dim, v_dim), inputs=(4, channels), gates=2 * v_heads)
    kernels = {"decode": decode.decode, "prefill": prefill.prefill, "verify": verify.verify}
    return Kind(delta_reference.advance, kernels, weights, layer)


def make_mamba(dtype: torch.dtype) -> Kind:
    heads, groups, head_dim, size = (4, 2, 24, 16) if IS_INTERPRETED else (48, 1, 64, 128)
    channels = heads * head_dim + 2 * groups * size
    conv, bias = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((4, channels), (channels,)))
    rate, dt_bias, skip = (torch.rand(heads, device=DEVICE) for _ in range(3))
    norm = torch.rand(heads * head_dim, device=DEVICE)
    weights = MambaWeights(conv, bias, -rate - 0.1, dt_bias, skip, norm, 1e-6, groups, size)
    layer = PerSequence(state=(heads, size, head_dim), inputs=(4, channels), gates=heads)
    return Kind(mamba_reference.advance, {"scan": mamba.advance}, weights, layer)


KINDS = {"delta": make_delta, "mamba": make_mamba}
KERNELS = [("delta", "decode"), ("delta", "prefill"), ("delta", "verify"), ("mamba", "scan")]


def make_rows(slots: list[int], positions: list[int], counts: list[int], lags: list[int]) -> Rows:
    starts = torch.tensor([0, *counts]).cumsum(0)
    each = (torch.tensor(slots), torch.tensor(positions), starts, torch.tensor(lags))
    return Rows(*(part.to(DEVICE, torch.int32) for part in each))


def copy(cache: StateCache) -> StateCache:
    return StateCache(cache.states.clone(), cache.inputs.clone(), cache.gates.clone())


def compare(kind: Kind, kernel: str, rows: Rows, dtype: torch.dtype, num_tokens: int, num_checked: int) -> None:
    """Compare outputs of the first tokens, and all slots: those of no row must be as they were."""
    x, cache = kind.project(num_tokens, dtype), kind.draw_cache(dtype)
    wanted = copy(cache)
    expected = kind.reference(x, wanted, rows, kind.weights)
    found = kind.kernels[kernel](x, cache, rows, kind.weights)
    scale: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(found[:num_checked].float(), expected[:num_checked].float(), **scale)
    torch.testing.assert_close(cache.states, wanted.states, **scale)
    used = sorted({*rows.slots.tolist()} - {-1})
    others = [slot for slot in range(SLOTS) if slot not in used]
    assert torch.equal(cache.states[others], wanted.states[others])
    assert torch.equal(cache.inputs, wanted.inputs)
    slots, positions = rows.slots.tolist(), rows.positions.tolist()
    for row in range(1, len(slots)):
        if slots[row] == slots[row - 1] >= 0:  # a draft, which a later step may take in
            at = slots[row], positions[row] % cache.num_kept
            assert torch.equal(cache.gates[at], wanted.gates[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_drafts_leave_the_state_of_the_token_before_them(name: str, kernel: str, dtype: torch.dtype) -> None:
    """Rows with 3, 0, 1 and 2 drafts that lack 0, 2, 3 and 1 tokens; one begins its text; two rows are padding."""
    torch.manual_seed(3)
    groups = [(4, 50, 3, 0), (7, 9, 0, 2), (1, 200, 1, 3), (3, 5, 2, 1), (6, 0, 1, 0)]
    slots = [slot for slot, _, drafts, _ in groups for _ in range(1 + drafts)]
    positions = [position + at for _, position, drafts, _ in groups for at in range(1 + drafts)]
    lags = [lag if at == 0 else 0 for _, _, drafts, lag in groups for at in range(1 + drafts)]
    num_rows = len(slots)
    rows = make_rows([*slots, -1, -1], [*positions, 0, 0], [1] * (num_rows + 2), [*lags, 0, 0])
    compare(KINDS[name](dtype), kernel, rows, dtype, num_rows + 2, num_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), [("delta", "prefill"), ("mamba", "scan")])
def test_prompts_run_with_rows_whose_states_lack_tokens(name: str, kernel: str, dtype: torch.dtype) -> None:
    """Rows that decode after drafts, then chunks of prompts, one of which goes on."""
    torch.manual_seed(4)
    counts = [1, 1, 7, 12]
    rows = make_rows([2, 8, 5, 0], [30, 11, 0, 40], counts, [2, 0, 0, 0])
    compare(KINDS[name](dtype), kernel, rows, dtype, sum(counts), sum(counts))
