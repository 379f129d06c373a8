# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of few tokens by GEMVs, against each expert by itself, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from triton_interpreter import large

few_tokens = pytest.importorskip("blink.kernels.gpu.moe.few_tokens")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GLM = (64, 4, 2048, 1536)


@pytest.fixture(autouse=True)
def _short_turns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs of the interpreter take several turns along short rows too."""
    if device.type == "cpu":
        monkeypatch.setattr(few_tokens, "_DEPTH", 32)


def run_expert(x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """Return SiLU(gate) * up of a token, rounded as it is kept, times down."""
    gate, up = (gate_up @ x).chunk(2)
    return down @ (functional.silu(gate) * up).to(dtype).float()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize(
    ("tokens", "padding", "sizes"),
    [
        (2, 1, (10, 3, 48, 24)),
        (1, 0, (8, 1, 72, 40)),
        (2, 0, (6, 6, 40, 56)),
        pytest.param(1, 0, GLM, marks=large),
        pytest.param(2, 2, GLM, marks=large),
    ],
)
def test_tokens_get_the_sum_of_their_experts(
    device: torch.device,
    tokens: int,
    padding: int,
    sizes: tuple[int, int, int, int],
    *,
    has_shared: bool,
    dtype: torch.dtype,
) -> None:
    """Ranks of padding choose nothing, and what its rows hold is not read."""
    (experts, top_k, hidden, size), generator = sizes, torch.Generator().manual_seed(sum(sizes))

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    x = (torch.randn(tokens + padding, hidden, generator=generator)).to(dtype)
    gate_up, down = draw(experts, 2 * size, hidden), draw(experts, hidden, size)
    shared = (draw(2 * size, hidden), draw(hidden, size)) if has_shared else None
    ranks, weights = torch.full((tokens + padding, experts), -torch.inf), torch.rand(tokens + padding, top_k)
    expected = torch.zeros(tokens + padding, hidden)
    for token in range(tokens):
        for place, expert in enumerate(torch.randperm(experts, generator=generator)[:top_k].tolist()):
            ranks[token, expert] = -place
            of_expert = run_expert(x[token].float(), gate_up[expert].float(), down[expert].float(), dtype)
            expected[token] += weights[token, place] * of_expert
        if shared is not None:
            expected[token] += run_expert(x[token].float(), shared[0].float(), shared[1].float(), dtype)
    x[tokens:], weights[tokens:] = torch.nan, torch.nan
    found = few_tokens.mix(
        x.to(device),
        ranks.to(device, dtype),
        weights.to(device),
        (gate_up.to(device), down.to(device)),
        None if shared is None else (shared[0].to(device), shared[1].to(device)),
        torch.tensor([tokens], dtype=torch.int32, device=device),
    )
    torch.testing.assert_close(found.cpu().float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_token_gets_the_same_bits_alone_and_with_others(device: torch.device) -> None:
    torch.manual_seed(3)
    x, ranks, weights = torch.randn(1, 48), torch.tensor([[-1.0, -torch.inf, 0.0, -torch.inf]]), torch.rand(1, 2)
    experts = torch.randn(4, 48, 48).to(device), torch.randn(4, 48, 24).to(device)
    shared = experts[0][3], experts[1][3]

    def run(tokens: int) -> Tensor:
        operands = (each.expand(tokens, -1).contiguous().to(device) for each in (x, ranks, weights))
        return few_tokens.mix(*operands, experts, shared, torch.tensor([tokens], dtype=torch.int32, device=device))

    assert torch.equal(run(3), run(1).expand(3, -1))
