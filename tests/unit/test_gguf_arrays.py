# SPDX-License-Identifier: Apache-2.0
"""GGUF matrices in arrays for a GPU: their bytes, and which of a file's the loader makes so. No kernel runs here."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blink.cli import model_fit
from blink.cli.torch_probe import Gpu, TorchReport
from blink.config import ModelConfig
from blink.formats.base import matrix_of
from blink.formats.gguf import GgufRows
from blink.formats.gguf_experts import GgufExperts, pack_experts
from blink.formats.layouts import Layout
from blink.formats.schemes import FormatId
from blink.models.layer_weights import MoeWeights
from blink.models.weight_bytes import count_weights
from blink.models.weights import loader, packed_loader
from blink.models.weights.checkpoint import GgufCheckpoint
from blink.models.weights.decoder_loader import DecoderLoader
from blink.models.weights.gguf_file import GgufTensor
from blink.models.weights.kept_blocks import KeepBlocks
from blink.models.weights.planar import pack_gguf
from blink.models.weights.source import read_spec
from blink.models.weights.target import WeightTarget
from blink.runner.sites import expected_sites, sites_of
from gguf_blocks import GPU_KINDS, Kind, make_blocks
from gguf_conversion import convert
from quantized_checkpoints import write_checkpoints

pytest.importorskip("triton")

import gguf

from blink.kernels.gpu.gemm.gguf_weight import PlanarGgufWeight

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def pack(kind: Kind, rows: int, columns: int) -> PlanarGgufWeight:
    blocks = GgufRows(int(kind), torch.from_numpy(make_blocks(kind, rows, columns)))
    weight = pack_gguf([blocks], columns, CPU, torch.bfloat16)
    assert isinstance(weight, PlanarGgufWeight)
    return weight


@pytest.mark.parametrize("kind", GPU_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("blocks", [1, 8, 9])
def test_planes_take_the_bytes_that_are_announced(kind: Kind, blocks: int) -> None:
    columns = blocks * gguf.GGML_QUANT_SIZES[kind][0]
    tensor = GgufTensor((3, columns), kind, 0, make_blocks(kind, 3, columns).nbytes)
    found = pack(kind, 3, columns)
    assert found.nbytes == tensor.gpu_bytes
    if columns % 64 == 0:
        assert tensor.num_bytes <= found.nbytes < 1.03 * tensor.num_bytes


def test_neighbours_of_one_format_become_one_part_and_many_rows_are_stored_in_order() -> None:
    rows = 8192 + 3  # more than are taken apart at once
    made = [(Kind.Q8_0, rows), (Kind.Q8_0, 5), (Kind.Q4_0, 2)]
    blocks = [GgufRows(int(kind), torch.from_numpy(make_blocks(kind, count, 64))) for kind, count in made]
    weight = pack_gguf(blocks, 64, CPU, torch.bfloat16)
    assert isinstance(weight, PlanarGgufWeight)
    assert weight.shape == (rows + 7, 64)
    assert [part.num_rows for part in weight._parts] == [rows + 5, 2]
    stored = torch.cat([part.blocks.view(-1, 2, 34)[..., 2:] for part in blocks[:2]])
    assert torch.equal(weight._parts[0].codes[0].view(-1, 2, 32) ^ 128, stored)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    options = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model("mixtral", **options, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    convert(folder, folder / "model.gguf", gguf.MODEL_ARCH.LLAMA, read_spec(folder), (Kind.Q8_0, Kind.Q4_0))
    return folder / "model.gguf"


def test_a_gpu_gets_planes_of_all_matrices(mixtral: Path) -> None:
    keep = KeepBlocks(functools.partial(pack_gguf, dtype=torch.bfloat16), CPU, pack_experts)
    spec = read_spec(mixtral)
    target = WeightTarget(CPU, torch.bfloat16, lambda _: None)
    decoder = DecoderLoader(GgufCheckpoint(mixtral, spec, keep), spec, target).load()
    layer = decoder.layers[0]
    assert all(isinstance(w, PlanarGgufWeight) for w in (decoder.embedding, decoder.lm_head, layer.qkv, layer.output))
    assert isinstance(layer.mlp, MoeWeights)
    assert isinstance(layer.mlp.gate_up, GgufExperts) and isinstance(layer.mlp.down, GgufExperts)
    gate, up = (part.codes for part in layer.mlp.gate_up.stacks)
    assert gate.shape == up.shape == (2, 1, 96, 64 if layer.mlp.gate_up.stacks[0].format is FormatId.Q8_0 else 32)
    assert layer.mlp.gate_up.shape == (2, 192, 64) and layer.mlp.down.shape == (2, 64, 96)
    assert decoder.dtype == torch.bfloat16 and matrix_of(layer.qkv).layout is Layout.GGUF
    assert decoder.num_weight_bytes == model_fit._count_gguf(mixtral, spec, 2).total


@pytest.mark.parametrize(
    ("capability", "dtype", "is_kept"),
    [
        ((9, 0), torch.bfloat16, True),
        ((8, 0), torch.float16, True),
        ((7, 5), torch.float16, False),
        ((9, 0), torch.float32, False),
    ],
)
def test_gpus_that_multiply_bfloat16_keep_matrices_quantised(
    capability: tuple[int, int], dtype: torch.dtype, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    keep = loader._keep_blocks(GPU, dtype)
    assert (keep is not None) == is_kept
    assert keep is None or keep.on_gpu


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_doctor_counts_what_a_gpu_keeps(
    capability: tuple[int, int], mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = TorchReport("2.11", (Gpu("a GPU", 80 << 30, 3e12, *capability),))
    monkeypatch.setattr(model_fit, "probe_torch", lambda: report)
    found = {finding.subject: finding.text for finding in model_fit.examine_given_model(str(mixtral))}
    assert ("stay as they are stored" in found["precision"]) == (capability >= (8, 0))


@pytest.mark.parametrize("scheme", ["awq-64", "gptq-32", "packed-64"])
@pytest.mark.parametrize("experts", [False, True])
def test_a_gpu_keeps_small_groups_of_4_bits(
    scheme: str, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 5 bits a weight, with their scales and offsets."""
    monkeypatch.setattr(packed_loader, "_has_kernels", lambda _: True)
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    path, _ = write_checkpoints(tmp_path, scheme, **(mixture if experts else {}))
    decoder = loader.load_model(ModelConfig(model=str(path)), CPU, torch.bfloat16)
    layer = decoder.layers[0]
    assert isinstance(layer.qkv, PlanarGgufWeight) and layer.qkv.nbytes == 5 / 8 * layer.qkv.shape[0] * 256
    if experts:
        assert isinstance(layer.mlp, MoeWeights)
        gate_up = layer.mlp.gate_up
        assert isinstance(gate_up, GgufExperts) and gate_up.nbytes == 5 / 8 * 4 * 256 * 256
    spec = read_spec(path)
    expected, found = expected_sites(spec, 16), sites_of(decoder, 16)
    assert [layer.matrices for layer in expected.layers] == [layer.matrices for layer in found.layers]
    counted = count_weights(spec, 2, stays_quantized=True).total
    assert counted == decoder.num_weight_bytes
