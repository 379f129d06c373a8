# SPDX-License-Identifier: Apache-2.0
"""GGUF matrices that stay quantised on a GPU: values and GEMMs of each format, and whole small models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from blink.config import ModelConfig
from blink.formats.base import QuantizedEmbedding
from blink.formats.gguf import GgufRows
from blink.formats.int4_arrays import pack_small_groups
from blink.formats.matrix import QuantizedMatrix
from blink.models.decoder import Decoder
from blink.models.layer_weights import list_weights
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.loader import load_model
from blink.models.weights.source import read_spec
from blink.runner.matmul import linear
from gguf_blocks import GPU_KINDS, KINDS, Kind, dequantize, make_blocks
from gguf_conversion import convert
from model_driver import Driver, compute_decoded_logits
from triton_interpreter import IS_INTERPRETED, large

pytest.importorskip("triton")
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from blink.kernels.gpu.gemm import gguf as kernels
from blink.kernels.gpu.gemm.gguf_weight import PlanarGgufWeight
from blink.models.weights.planar import pack_gguf

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if IS_INTERPRETED else 4e-3  # of a GEMM: what rounding to its type takes
NUM_TOKENS = 12
MODEL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-17,  # GGUF stores it in float32
    "pad_token_id": 0,
    "eos_token_id": 7,
}

kinds = pytest.mark.parametrize("kind", GPU_KINDS, ids=lambda kind: kind.name)


def make_weight(
    parts: Sequence[tuple[Kind, int]], columns: int, dtype: torch.dtype = DTYPE
) -> tuple[PlanarGgufWeight, Tensor]:
    """Return a weight of parts of so many rows, and its values as the gguf package has them."""
    made = [(kind, make_blocks(kind, rows, columns, seed)) for seed, (kind, rows) in enumerate(parts)]
    weight = pack_gguf([GgufRows(int(kind), torch.from_numpy(rows)) for kind, rows in made], columns, DEVICE, dtype)
    assert isinstance(weight, PlanarGgufWeight)
    return weight, torch.cat([dequantize(rows, kind) for kind, rows in made]).to(DEVICE)


def draw(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=DEVICE).to(DTYPE)


def check(found: Tensor, x: Tensor, values: Tensor) -> None:
    """Hold a GEMM against float64 on values in the type that is multiplied; each number by its terms' size."""
    weight = values.to(x.dtype).double()
    exact = x.double() @ weight.T
    rounding = LIMIT * exact.abs() + 1e-5 * (x.double().abs() @ weight.abs().T) + 1e-30
    assert found.shape == exact.shape and found.dtype == x.dtype
    assert bool(((found.double() - exact).abs() <= rounding).all())


def step(kind: Kind) -> int:
    return gguf.GGML_QUANT_SIZES[kind][0]


@kinds
def test_values_are_those_of_the_gguf_package_to_the_last_bit(kind: Kind) -> None:
    """Also where a row ends in the middle of a unit, or of the units that a program takes."""
    for rows, columns in ((1, step(kind)), (3, 9 * step(kind))):
        weight, values = make_weight([(kind, rows)], columns, torch.float32)
        assert torch.equal(weight.dequantize(), values)
    ids = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    assert torch.equal(weight.take_rows(ids), values[ids])


@kinds
@pytest.mark.parametrize("rows", [1, 400, *(pytest.param(rows, marks=large) for rows in (3, 17, 64, 65, 300))])
def test_products_equal_those_of_the_dequantised_weight(kind: Kind, rows: int) -> None:
    """Of weights whose edges lie within tiles and within units."""
    torch.manual_seed(1)
    shapes = ((67, 3 * step(kind)),) if IS_INTERPRETED else ((1, step(kind)), (67, 3 * step(kind)), (512, 1280))
    for columns, depth in shapes:
        weight, values = make_weight([(kind, columns)], depth)
        x = draw(rows, depth)
        check(linear(x, weight), x, values)


@pytest.mark.parametrize("group", [32, 64])
def test_small_groups_of_4_bits_stay_4_bits(group: int) -> None:
    """Within what rounding their offsets to float16 takes: a small part of a step between numbers."""
    matrix = draw_int4(21, 192 if group == 64 else 160, group)
    arrays = pack_small_groups(matrix)
    weight = PlanarGgufWeight([arrays], matrix.values.shape[1], torch.float32)
    steps = matrix.scales.repeat_interleave(group, 1)
    assert bool(((weight.dequantize() - matrix.dequantize(torch.float32)).abs() <= steps / 128).all())
    x = torch.randn(3, weight.shape[1], device=DEVICE)
    torch.testing.assert_close(linear(x, weight), x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


def draw_int4(rows: int, columns: int, group: int) -> QuantizedMatrix:
    torch.manual_seed(group)
    size = (rows, columns // group)
    scales = (0.01 * torch.rand(size, device=DEVICE) + 1e-3).half().float()
    codes, zeros = (torch.randint(16, shape, dtype=torch.uint8, device=DEVICE) for shape in ((rows, columns), size))
    return QuantizedMatrix(codes, scales, zeros)


@large
@kinds
@pytest.mark.parametrize("rows", [1, 33, 200])
def test_so_do_those_of_a_wide_weight(kind: Kind, rows: int) -> None:
    torch.manual_seed(2)
    weight, values = make_weight([(kind, 4096 + 24)], 4096)
    x = draw(rows, 4096)
    check(linear(x, weight), x, values)


@pytest.mark.parametrize("configs", [2, *(pytest.param(configs, marks=large) for configs in (1, 3))])
@pytest.mark.parametrize("units", [2, *(pytest.param(units, marks=large) for units in (1, 4))])
def test_parts_of_several_formats_and_shares_of_columns_give_one_product(configs: int, units: int) -> None:
    torch.manual_seed(3)
    parts = [*zip(KINDS, (5, 21, 1, 40, 17), strict=True)][slice(1, 4) if IS_INTERPRETED else slice(5)]
    weight, values = make_weight(parts, 512)
    columns = weight.shape[0]
    x, bias = draw(3 if IS_INTERPRETED else 18, 512), draw(1, columns)[0]
    found = kernels.multiply(
        x, weight._parts, kernels.GgufTiling(16, 64 if IS_INTERPRETED else 32, units, 4, 2, configs)
    )
    check(found, x, values)
    ids = torch.tensor([columns - 1, 0, 20, 21, 22], dtype=torch.int32, device=DEVICE)
    assert torch.equal(weight.take_rows(ids), values[ids].to(DTYPE))
    if not IS_INTERPRETED:
        torch.testing.assert_close(linear(x, weight, bias), linear(x, weight) + bias)


@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 4096), (576, 1536), (31, 32)])
def test_tiles_share_the_inner_dimension_only_where_it_is_long(rows: int, columns: int, depth: int) -> None:
    tiling = kernels.choose_gguf_tiling(rows, columns, depth)
    assert tiling.rows >= min(rows, 128)
    assert 1 <= tiling.slices <= max(1, depth // (4 * tiling.units * 64))


def save_gguf(path: Path, model_type: str, formats: Sequence[Kind], **options: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(4)
    config = AutoConfig.for_model(model_type, **{**MODEL, **options})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3, "mixtral": gguf.MODEL_ARCH.LLAMA}
    convert(path, path / "model.gguf", arch[model_type], read_spec(path), formats)
    return path / "model.gguf"


def load(path: Path, dtype: str = "auto") -> Decoder:
    return load_model(ModelConfig(model=str(path), dtype=dtype), DEVICE, torch.bfloat16)


def list_gguf_weights(decoder: Decoder) -> list[object]:
    weights = list_weights([decoder.embedding, *decoder.layers, decoder.lm_head])
    return [weight for weight in weights if isinstance(weight, QuantizedEmbedding)]


@large
@pytest.mark.parametrize(
    ("model_type", "formats", "options"),
    [
        # Each matrix in another format; heads interleaved; the embedding is the output too.
        ("llama", (Kind.Q4_K, Kind.Q6_K, Kind.Q4_1), {"tie_word_embeddings": True}),
        ("qwen3", (Kind.Q8_0, Kind.Q4_0), {}),
        ("mixtral", (Kind.Q4_K,), {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_a_model_that_stays_quantised_gives_the_tokens_and_logits_of_the_dequantised(
    model_type: str, formats: Sequence[Kind], options: dict[str, Any], tmp_path: Path
) -> None:
    path = save_gguf(tmp_path, model_type, formats, **options)
    kept, plain = load(path), load(path, "bfloat16")
    weights = list_gguf_weights(kept)
    assert weights and all(isinstance(weight, PlanarGgufWeight) for weight in weights)
    assert not list_gguf_weights(plain)
    if model_type != "mixtral":  # whose experts are dequantised
        stored = sum(tensor.num_bytes for tensor in GgufFile(path).tensors.values())
        assert kept.num_weight_bytes < 1.05 * stored
    for rows in (1, 3, 17, 64):
        found, expected = (compute_decoded_logits(decoder, rows) for decoder in (kept, plain))
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(errors.median()) < 4e-2  # a row whose router stands between two experts may choose another
    assert count_best(plain, generate(kept), NUM_TOKENS) > 0.9


def generate(decoder: Decoder) -> list[list[int]]:
    """Return prompts of several chunks with greedy tokens."""
    driver = Driver(decoder, max_len=128)
    for length in (11, 3, 70):
        driver.add([(length * i + 5) % 150 for i in range(length)], NUM_TOKENS)
    return driver.run(max_chunk=40)


def count_best(decoder: Decoder, sequences: list[list[int]], last: int) -> float:
    """Return the share of their last tokens that a decoder finds best too, but for a tenth of what logits differ by."""
    ends = [(tokens, end) for tokens in sequences for end in range(len(tokens) - last, len(tokens))]
    driver = Driver(decoder, num_slots=len(ends), max_len=128)
    for tokens, end in ends:
        driver.add(tokens[:end], 1)
    logits = driver.compute_logits().float()
    found = torch.tensor([tokens[end] for tokens, end in ends])
    missing = logits.amax(1) - logits.gather(1, found.to(logits.device)[:, None])[:, 0]
    return float((missing <= 0.1 * logits.std(1)).float().mean())
