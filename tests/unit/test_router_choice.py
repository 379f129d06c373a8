# SPDX-License-Identifier: Apache-2.0
"""The choice of experts by scores, bias and groups, against the same rule in plain Python; and experts so weighted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.kernels.cpu import router as cpu
from blink.kernels.moe import moe
from blink.kernels.router import choose_experts
from blink.models.mlps import DenseMlp, MoeMlp, Router
from model_specs import make_attention, make_spec

ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {"score": "sigmoid", "has_bias": True, "renormalize": True},
    "sigmoid-plain": {"score": "sigmoid", "has_bias": True, "scale": 1.8},
    "groups": {"score": "sigmoid", "has_bias": True, "renormalize": True, "groups": 4, "top_groups": 2, "scale": 2.5},
    "softmax-bias": {"has_bias": True, "renormalize": True},
    "softmax-groups": {"groups": 4, "top_groups": 2, "group_best": 1, "scale": 16.0},
}


def choose_plainly(logits: list[float], bias: list[float], router: Router) -> dict[int, float]:
    """Return the experts of one token, in the order of their choice, with their weights."""
    if router.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        mass = sum(map(math.exp, logits))
        scores = [math.exp(logit) / mass for logit in logits]
    choice = [score + added for score, added in zip(scores, bias, strict=True)]
    size = len(logits) // router.groups
    groups = [range(start, start + size) for start in range(0, len(logits), size)]

    def worth(group: range) -> float:
        return sum(sorted((choice[expert] for expert in group), reverse=True)[: router.group_best])

    kept = groups if router.groups == 1 else sorted(groups, key=worth, reverse=True)[: router.top_groups]
    experts = sorted((expert for group in kept for expert in group), key=lambda expert: -choice[expert])
    found = {expert: scores[expert] for expert in experts[: router.top_k]}
    divisor = sum(found.values()) if router.renormalize else 1.0
    return {expert: router.scale * score / divisor for expert, score in found.items()}


def draw(router: Router, tokens: int = 40) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    return 2 * torch.randn(tokens, 16), 0.4 * torch.randn(16) * router.has_bias


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_experts_and_weights_are_those_of_the_rule(options: dict[str, Any]) -> None:
    router = Router(top_k=3, **options)
    logits, bias = draw(router)
    ranks, weights = choose_experts(
        cpu.choose_experts, logits, router, bias if router.has_bias else None, torch.bfloat16
    )
    for token, row in enumerate(logits.tolist()):
        wanted = choose_plainly(row, bias.tolist(), router)
        order = ranks[token].argsort(descending=True)[:3].tolist()
        assert order == list(wanted)
        assert ranks[token, order].tolist() == [0.0, -1.0, -2.0]
        assert int(ranks[token].isinf().sum()) == 13
        torch.testing.assert_close(weights[token], torch.tensor(list(wanted.values())), rtol=1e-5, atol=1e-6)


def test_the_bias_is_for_the_choice_alone() -> None:
    router = Router(top_k=1, score="sigmoid", has_bias=True)
    bias = torch.tensor([0.0, 5.0, 0.0])
    ranks, weights = choose_experts(cpu.choose_experts, torch.zeros(1, 3), router, bias, torch.float32)
    assert ranks.argmax() == 1
    assert weights.tolist() == [[0.5]]


@pytest.mark.parametrize("name", ["sigmoid-plain", "groups"])
def test_results_of_experts_are_summed_by_the_weights(name: str) -> None:
    router = Router(top_k=3, **ROUTERS[name])
    logits, bias = draw(router, tokens=7)
    x, gate_up, down = torch.randn(7, 8), torch.randn(16, 12, 8), torch.randn(16, 8, 6)
    ranks, weights = choose_experts(cpu.choose_experts, logits, router, bias, torch.float32)
    found = moe(x, ranks, gate_up, down, top_k=3, renormalize=router.renormalize, weights=weights)
    for token, row in enumerate(logits.tolist()):
        expected = torch.zeros(8)
        for expert, weight in choose_plainly(row, bias.tolist(), router).items():
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"top_k": 17}, "more experts than there are"),
        ({"top_k": 2, "groups": 3}, "groups of experts must be of one size"),
        ({"top_k": 2, "groups": 4, "top_groups": 5}, "and some of them"),
        ({"top_k": 5, "groups": 4, "top_groups": 1}, "must hold enough experts"),
        ({"top_k": 1, "groups": 16, "top_groups": 2}, "as many experts as make its score"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(options: dict[str, Any], reason: str) -> None:
    mlp: DenseMlp | MoeMlp = MoeMlp(experts=16, size=32, router=Router(**options))
    with pytest.raises(ConfigError, match=reason):
        make_spec("mixtral", make_attention(4, 2, 32), mlp, num_layers=1).check("config.json")
