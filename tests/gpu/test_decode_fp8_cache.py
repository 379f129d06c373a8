# SPDX-License-Identifier: Apache-2.0
"""Attention of decoding rows over a KV cache in FP8: csrc/kernels/attention/attention.cuh against references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink import LLM, SamplingParams
from blink.config import ModelConfig
from blink.formats.fp8 import FP8
from blink.kernels.batch import Batch
from blink.kernels.cpu.attention import paged_attention, plan_attention
from blink.kernels.cpu.rotary import rotate_and_store_torch
from blink.kernels.gpu.device import has_clusters
from blink.kernels.layer_cache import KvCache, LayerCache
from blink.kernels.operands import AttentionOptions, HeadNorm, KvScales
from blink.kernels.rotary import make_rotary_table
from blink.llm import RequestOutput
from blink.models.rope import Rope
from blink.models.weights.loader import load_model
from blink.plan.execution_plan import NormStyle
from blink.runner.run import Runner
from model_driver import Driver
from model_specs import clone_cache, fill_cache, stack_cache
from quantized_checkpoints import write_checkpoints

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_decode_kernels import BLOCK_SIZE, draw, error, make_batch, make_decoder, on_gpu

from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm import tile_configs
from blink.kernels.gpu.gemm.tile_configs import AttentionConfig
from blink.plan.site import Bucket
from step_plans import plan_of

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

SCALES = KvScales(0.75, 2.0)


def attend_reference(
    qkv: Tensor, cache: Tensor, batch: Batch, table: Tensor, norm: HeadNorm | None, scales: KvScales
) -> Tensor:
    """Attend with the references, in float32 but for what the cache keeps; cache is written."""
    active = int((batch.context_lens > 0).sum())
    rotation = table[batch.positions[:active].long()]
    layer = LayerCache(cache)
    query = rotate_and_store_torch(qkv[:active].clone(), rotation, batch.kv_slots[:active], layer, norm, scales)
    plan = plan_attention(batch, active, layer.block_size, torch.float32)
    expected = torch.zeros(qkv.shape[0], query.shape[1] * query.shape[2])
    expected[:active] = paged_attention(query.float(), layer, plan, AttentionOptions(kv_scales=scales))
    return expected


@pytest.mark.parametrize(
    "lengths", [[1], [15], [17], [2000], [1, 15, 17, 0], [300, 16, 700, 1, 128, 129, 0, 0], [5000, 31]], ids=str
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "with_norm"),
    [(32, 8, 128, 128, False), (9, 3, 64, 64, False), (4, 1, 128, 96, False), (16, 2, 128, 128, True),
     (3, 3, 64, 32, True), (5, 1, 128, 128, False)],
)  # fmt: skip
def test_attention_and_cache_equal_the_reference(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, rotary_dim: int, with_norm: bool
) -> None:
    torch.manual_seed(4)
    batch, num_blocks = make_batch(lengths, 6000)
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=rotary_dim).frequencies(), 6000, "cpu")
    qkv = draw(len(lengths), (heads + 2 * kv_heads) * head_dim)
    weights = torch.rand(2, head_dim).to(torch.bfloat16) + 0.5
    norm = HeadNorm(weights[0], weights[1], 1e-6) if with_norm else None
    norm_on_gpu = HeadNorm(weights[0].cuda(), weights[1].cuda(), 1e-6) if with_norm else None
    cache = draw(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim).to(FP8)
    expected_cache = cache.cpu()
    expected = attend_reference(qkv.cpu(), expected_cache, batch, table, norm, SCALES)
    found = decode_attention(qkv, LayerCache(cache), on_gpu(batch), table.cuda(), norm_on_gpu, kv_scales=SCALES).cpu()
    assert error(found, expected) < 1e-2
    cells, expected_cells = (part.float().flatten(1, 2) for part in (cache.cpu(), expected_cache))
    # What was nearly between two numbers of FP8 may be rounded to the other.
    assert error(cells, expected_cells) < 1e-2
    untouched = torch.ones(cells.shape[1], dtype=torch.bool)
    untouched[batch.kv_slots[batch.kv_slots >= 0].long()] = False
    assert torch.equal(cells[:, untouched], expected_cells[:, untouched])
    assert not found[int((batch.context_lens > 0).sum()) :].any()


def test_numbers_beyond_fp8_become_its_largest_and_what_lies_behind_is_ignored() -> None:
    torch.manual_seed(8)
    lengths, kv_heads, head_dim = [1, 15, 16, 33, 700], 2, 128
    batch, num_blocks = make_batch(lengths, 1000)
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), 1000, "cpu")
    qkv, cache = draw(len(lengths), 12 * head_dim), draw(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim).to(FP8)
    qkv[:, -kv_heads * head_dim :] *= 1000
    expected_cache = cache.cpu()
    expected = attend_reference(qkv.cpu(), expected_cache, batch, table, None, SCALES)
    assert expected_cache.float().abs().max() == torch.finfo(FP8).max
    for slot, length in zip(batch.kv_slots.tolist(), lengths, strict=True):
        behind = slice(slot, slot + BLOCK_SIZE - (length - 1) % BLOCK_SIZE)
        cache.view(torch.uint8).flatten(1, 2)[:, behind] = 0x7F  # NaN
    found = decode_attention(qkv, LayerCache(cache), on_gpu(batch), table.cuda(), kv_scales=SCALES).cpu()
    assert error(found, expected) < 1e-2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_any_split_of_the_keys_gives_the_same_attention(
    block_size: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(9)
    kv_heads, lengths = 2, [1, 130, 16, 511]
    batch, num_blocks = make_batch(lengths, 512, block_size)
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), 512, "cpu")
    qkv, cache = draw(len(lengths), 8 * head_dim), draw(2, num_blocks, block_size, kv_heads, head_dim).to(FP8)
    expected = attend_reference(qkv.cpu(), cache.cpu(), batch, table, None, SCALES)
    tried = list(tile_configs.list_attention_configs(2, head_dim))
    for config in [AttentionConfig(1, 1, 1), AttentionConfig(1, 1, 7), *tried[:: len(tried) // 4]]:
        monkeypatch.setattr(
            "blink.kernels.gpu.attention.decode.choose_attention_config", lambda *_, config=config: config
        )
        found = decode_attention(qkv, LayerCache(cache.clone()), on_gpu(batch), table.cuda(), kv_scales=SCALES).cpu()
        assert error(found, expected) < 1e-2, config


@pytest.mark.parametrize("lengths", [[1], [17, 300], [300, 16, 41, 0], [*range(1, 400, 12)]], ids=str)
@pytest.mark.parametrize(("qk_norm", "bias"), [(False, False), (True, True)])
def test_a_decoding_step_gives_the_logits_and_the_cache_of_the_general_one(
    lengths: list[int], qk_norm: bool, bias: bool
) -> None:
    torch.manual_seed(9)
    decoder = make_decoder(qk_norm=qk_norm, bias=bias)
    rows = len(lengths)
    assert plan_of(decoder, rows, block_size=BLOCK_SIZE).norms is not NormStyle.KERNEL
    host_batch, num_blocks = make_batch(lengths, 512)
    host_batch.input_ids.random_(1000)
    host_batch.block_tables.clamp_(max=num_blocks - 1)
    batch = on_gpu(host_batch)
    wide = fill_cache(decoder.allocate_kv_cache(num_blocks, BLOCK_SIZE))
    cache = KvCache({index: LayerCache(layer.cells.to(FP8)) for index, layer in enumerate(wide)})
    twin = clone_cache(cache)
    active = sum(length > 0 for length in lengths)
    expected = Runner(decoder).compute_logits(batch, twin, Bucket(rows, rows))[:active]
    found = Runner(decoder).compute_logits(batch, cache, Bucket(rows, rows, decoding=True))[:active]
    assert error(found, expected) < 4e-2
    assert error(stack_cache(cache), stack_cache(twin)) < 2e-2


def compute_logits(path: Path, device: str, dtype: torch.dtype, kv_cache_dtype: str) -> Tensor:
    """Logits behind prompts that were computed in chunks: of one token, of 8 and of 48."""
    config = ModelConfig(model=str(path), kv_cache_dtype=kv_cache_dtype)
    driver = Driver(load_model(config, torch.device(device), dtype))
    for length in (193, 200, 240):
        driver.add([(7 * i + length) % 120 + 3 for i in range(length)], 1)
    for _ in range(4):
        driver.step(48)
    return driver.compute_logits().float().cpu()


def test_a_model_gives_the_logits_of_the_cpu_engine(tmp_path: Path) -> None:
    _, path = write_checkpoints(tmp_path, "fp8-channel")
    expected = compute_logits(path, "cpu", torch.float32, "fp8")
    assert error(compute_logits(path, "cuda", torch.float32, "fp8"), expected) < 2e-2
    assert error(compute_logits(path, "cuda", torch.bfloat16, "fp8"), expected) < 6e-2
    assert error(compute_logits(path, "cpu", torch.float32, "auto"), expected) < 1e-1


def test_the_engine_chooses_tokens_that_the_cpu_engine_finds_as_good_as_the_best(tmp_path: Path) -> None:
    """Graphs with the decode kernels, launched by the GPU's scheduler."""
    _, path = write_checkpoints(tmp_path, "fp8-channel")
    prompts = [[(5 * i + length) % 120 + 3 for i in range(length)] for length in (4, 18, 90, 130)]
    options: dict[str, Any] = {
        "model": str(path),
        "kv_cache_dtype": "fp8",
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 8,
    }
    options |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 64}
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(device="cuda", **options) as llm:
        found = generate(llm, prompts, greedy)
    texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, found, strict=True)]
    with LLM(device="cpu", dtype="float32", **options) as llm:
        scored = generate(llm, texts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    chosen = [
        (position[token].logprob, max(entry.logprob for entry in position.values()))
        for output in scored
        for token, position in zip(output.prompt_token_ids[-24:], (output.prompt_logprobs or [])[-24:], strict=True)
        if position is not None
    ]
    assert len(chosen) == 4 * 24
    assert min(own - best for own, best in chosen) > -0.3


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
