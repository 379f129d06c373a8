# SPDX-License-Identifier: Apache-2.0
"""GEMMs of prompts in bfloat16: against rounded operands, and only for the rows that may round."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from blink.config import EngineConfig
from blink.engine.combinations import check_combinations
from blink.engine.rounding import check_rounding
from blink.errors import ConfigError
from blink.formats.gguf import GgufRows
from blink.kernels.cpu.gguf_weight import Bf16Isa, GgufWeight, Int16Isa
from blink.kernels.rounding import EXACT, LEAST_ROWS, Rounding, begin_step, find_prompt_rows
from gguf_blocks import KINDS, dequantize, make_blocks

Kind = gguf.GGMLQuantizationType
PROMPTS = Rounding(prompts=True)
HERE = [isa for isa in (Bf16Isa.PLAIN, Bf16Isa.AMX) if isa.is_here]


def multiply(weight: GgufWeight, x: Tensor, isa: Bf16Isa) -> Tensor:
    out = torch.full((len(x), weight.shape[0]), torch.nan)
    weight.multiply_rounded(x, out, isa)
    return out


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_those_of_rounded_operands(kind: Kind, isa: Bf16Isa) -> None:
    """Two parts, the first of which ends within a tile; numbers of rows that fill no tile, one, and some of several."""
    step = gguf.GGML_QUANT_SIZES[kind][0]
    torch.manual_seed(50)
    for columns, sizes in ((step, (1, 40)), (3 * step, (67, 33))):
        blocks = [make_blocks(kind, rows, columns, rows) for rows in sizes]
        weight = GgufWeight([GgufRows(int(kind), torch.from_numpy(each)) for each in blocks], columns)
        rounded = torch.cat([dequantize(each, kind) for each in blocks]).bfloat16().double()
        for rows in (1, 16, 31, 32, 33, 70):
            x = torch.randn(rows, columns)
            exact = x.bfloat16().double() @ rounded.T
            terms = x.bfloat16().double().abs() @ rounded.abs().T
            assert ((multiply(weight, x, isa).double() - exact).abs() <= 1e-6 * terms + 1e-30).all()


def test_decode_rows_are_never_rounded() -> None:
    """Rows of a step before its prompts have the bits that they have alone, and others of such a number too."""
    torch.manual_seed(51)
    weight = GgufWeight([GgufRows(int(Kind.Q8_0), torch.from_numpy(make_blocks(Kind.Q8_0, 70, 64)))], 64)
    x = torch.randn(LEAST_ROWS + 3, 64)
    exact = weight.multiply(x)
    if not Bf16Isa.BEST.is_here:  # what rounds is not here, which the engine refuses
        return
    begin_step(PROMPTS, len(x), 3)
    try:
        found, of_fewer = weight.multiply(x), weight.multiply(x[:5])
        assert torch.equal(found[:3], exact[:3])
        assert torch.equal(found[3:], multiply(weight, x[3:].contiguous(), Bf16Isa.BEST))
        assert torch.equal(of_fewer, exact[:5])
        assert not torch.equal(found[3:], exact[3:])
    finally:
        begin_step(EXACT, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "first", "rows", "found"),
    [(40, 8, 40, 8), (40, 9, 40, 40), (40, 0, 40, 0), (40, 0, 39, 39), (300, 300, 300, 300), (0, 0, 0, 0)],
)
def test_prompts_of_32_tokens_and_more_are_rounded(tokens: int, first: int, rows: int, found: int) -> None:
    begin_step(PROMPTS, tokens, first)
    try:
        assert find_prompt_rows(rows) == found
    finally:
        begin_step(EXACT, 0, 0)


FLAGS = ({"cpu_prompt_gemm": "bfloat16"}, {"cpu_gemm": "int16"})


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("options", [{"deterministic": True}, {"tensor_parallel_size": 2}])
def test_rounding_is_refused_with_what_compares_bits(options: dict[str, Any], flag: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"gemm \w+ goes neither"):
        check_combinations(EngineConfig(**flag, **options), "cpu")


@pytest.mark.parametrize(("flag", "isa", "name"), [(FLAGS[0], Bf16Isa, "AMX"), (FLAGS[1], Int16Isa, "VNNI")])
def test_rounding_is_refused_without_instructions_for_it(
    flag: dict[str, Any], isa: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "is_here", False)
    check_rounding(EngineConfig())
    with pytest.raises(ConfigError, match=rf"needs a processor with .*{name}"):
        check_rounding(EngineConfig(**flag))
