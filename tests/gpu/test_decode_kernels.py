# SPDX-License-Identifier: Apache-2.0
# The cuda packages choose their modules when imported, which pyright cannot follow.
# pyright: reportAttributeAccessIssue=false
"""The kernels of decoding rows against plain references, over shapes and edges; what overlaps must not race."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.batch import Batch, Header
from blink.kernels.cpu.activation import activate
from blink.kernels.cpu.attention import paged_attention, plan_attention
from blink.kernels.cpu.rms_norm import rms_norm_torch
from blink.kernels.cpu.rotary import rotate_and_store_torch
from blink.kernels.gpu.device import has_clusters
from blink.kernels.layer_cache import LayerCache
from blink.kernels.operands import HeadNorm
from blink.kernels.rotary import make_rotary_table
from blink.models.decoder import Decoder
from blink.models.layer_weights import DenseWeights, LayerWeights
from blink.models.mlps import DenseMlp
from blink.models.rope import Rope
from blink.plan.execution_plan import NormStyle
from blink.runner.run import Runner
from model_driver import Driver
from model_specs import clone_cache, fill_cache, make_attention, make_spec, stack_cache

pytest.importorskip("cuda.core")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from cuda.bindings import driver
from cuda.core import Device, Program, ProgramOptions

from blink.kernels.gpu.attention.decode import decode_attention
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import gemv, tile_configs
from blink.kernels.gpu.gemm.gemv import add_linear, gated_linear, normed_linear
from blink.kernels.gpu.gemm.tile_configs import AttentionConfig, Output
from blink.kernels.gpu.launch import check, launch
from blink.plan.site import Bucket
from blink.runner import gpu_device
from blink.runner.gpu_device import MAX_GEMV_ROWS
from step_plans import plan_of

pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU with programmatic launches")

EPS = 1e-5
BLOCK_SIZE = 16


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_torch(x.float(), weight.float(), EPS)


def inverse_rms_of(x: Tensor) -> Tensor:
    """Return the norm's rate of each row, as the router's GEMM leaves them."""
    return (x.float().square().mean(1) + EPS).rsqrt()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("n", "k"), [(96, 512), (40, 576), (36, 4096), (64, 5120), (34, 14336), (32, 1056)])
def test_products_equal_the_reference(rows: int, n: int, k: int) -> None:
    torch.manual_seed(1)
    x, weight, norm_weight, bias = draw(rows, k), draw(n, k, scale=k**-0.5), draw(k), draw(n)
    expected = functional.linear(normed(x, norm_weight), weight.float())
    assert error(normed_linear(x, norm_weight, EPS, weight), expected) < 1e-2
    assert error(normed_linear(x, norm_weight, EPS, weight, bias), expected + bias.float()) < 1e-2
    residual = draw(rows, n)
    added = residual.float() + functional.linear(x.float(), weight.float())
    found = residual.clone()
    add_linear(x, weight, found)
    assert error(found, added) < 1e-2
    found = residual.clone()
    add_linear(x, weight, found, bias)
    assert error(found, added + bias.float()) < 1e-2


@pytest.mark.parametrize("rows", [1, 2])
def test_a_width_of_seventeen_times_a_power_of_two_takes_seventeen_warps(rows: int) -> None:
    test_products_equal_the_reference(rows, 40, 17408)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(("n", "k"), [(96, 512), (42, 576), (36, 4096), (768, 576), (37, 1056)])
def test_fused_gate_up_equal_the_reference(rows: int, n: int, k: int) -> None:
    torch.manual_seed(2)
    x, weight, norm_weight = draw(rows, k), draw(2 * n, k, scale=k**-0.5), draw(k)
    expected = activate(functional.linear(normed(x, norm_weight), weight.float()))
    assert error(gated_linear(x, norm_weight, EPS, weight), expected) < 1e-2


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize(("warps", "cluster", "stages"), [(4, 1, 2), (2, 4, 3), (8, 2, 4)])
def test_any_split_gives_the_same_products(
    rows: int, slices: int, warps: int, cluster: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows * slices > 16 or 32 * slices * warps * cluster > 2048:
        pytest.skip("the instruction has 16 rows, and each warp takes a whole load")
    torch.manual_seed(3)
    x, weight, norm_weight = draw(rows, 2048), draw(84, 2048), draw(2048)
    products = functional.linear(normed(x, norm_weight), weight.float())
    config = gemv.TileConfig(warps, cluster, slices, 32, 8, stages)
    monkeypatch.setattr(gemv, "choose_config", lambda *_: config)
    assert error(normed_linear(x, norm_weight, EPS, weight), products) < 1e-2
    assert error(gated_linear(x, norm_weight, EPS, weight), activate(products)) < 1e-2


GEMM_ROWS = [1, 5, 8, 9, 16, 24, 31, 32, 33, 48, 64, 65, 80, 96, 97, 128]


def pad(rows: int) -> int:
    return tile_configs.bucket_rows(rows, plain=True)


def norm_of(x: Tensor, weight: Tensor, parts: int = 3) -> gemm.NormInput:
    """Return what the kernels hand on of a row's norm, its squares in uneven parts."""
    shares = torch.rand(parts, x.shape[0], device="cuda")
    square_sums = torch.full((parts, pad(x.shape[0])), torch.nan, device="cuda")
    square_sums[:, : x.shape[0]] = shares / shares.sum(0) * x.float().square().sum(1)
    return gemm.NormInput((x.float() * weight.float()).to(torch.bfloat16), square_sums)


def check_matmuls(rows: int, n: int, k: int) -> None:
    x, weight, norm_weight, bias = draw(rows, k), draw(n, k, scale=k**-0.5), draw(k), draw(n)
    normed_x = norm_of(x, norm_weight)
    expected = functional.linear(normed(x, norm_weight), weight.float())
    assert error(gemm.normed_linear(normed_x, EPS, weight), expected) < 1e-2
    assert error(gemm.normed_linear(normed_x, EPS, weight, bias), expected + bias.float()) < 1e-2
    residual, next_norm = draw(rows, n), draw(n)
    for added in (None, bias):
        found = residual.clone()
        following = gemm.add_linear(x, weight, found, next_norm, added, tokens=pad(rows))
        product = functional.linear(x.float(), weight.float(), None if added is None else added.float())
        assert error(found, residual.float() + product) < 1e-2
        assert error(following.x, found.float() * next_norm.float()) < 1e-2
        assert error(following.square_sums.sum(0)[:rows], found.float().square().sum(1)) < 1e-4


def check_gated_matmul(rows: int, n: int, k: int) -> None:
    x, weight, norm_weight = draw(rows, k), draw(2 * n, k, scale=k**-0.5), draw(k)
    expected = activate(functional.linear(normed(x, norm_weight), weight.float()))
    assert error(gemm.gated_linear(norm_of(x, norm_weight), EPS, weight), expected) < 1e-2


@pytest.mark.parametrize("rows", GEMM_ROWS)
@pytest.mark.parametrize(("n", "k"), [(96, 512), (48, 584), (208, 4096), (64, 14336), (16, 72)])
def test_products_of_many_rows_equal_the_reference(rows: int, n: int, k: int) -> None:
    torch.manual_seed(6)
    check_matmuls(rows, n, k)
    check_gated_matmul(rows, n, k)


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("output", list(Output), ids=lambda output: output.name)
def test_any_split_of_many_rows_gives_the_same_products(
    tokens: int, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    tried = list(tile_configs.list_gemm_configs(output, tokens))
    for config in tried[:: max(1, len(tried) // 4)]:
        monkeypatch.setattr(gemm, "choose_gemm_config", lambda *_, config=config: config)
        rows, n, k = tokens - 3, 224, 1352
        x, weight, norm_weight = draw(rows, k), draw(n, k, scale=k**-0.5), draw(k)
        if output is Output.ADD:
            found = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
            gemm.add_linear(x, weight, found, draw(n), tokens=tokens)
            expected = functional.linear(x.float(), weight.float())
        else:
            run = gemm.gated_linear if output is Output.GATE else gemm.normed_linear
            found, expected = run(norm_of(x, norm_weight), EPS, weight), normed(x, norm_weight) @ weight.float().T
            if output is Output.GATE:
                expected = activate(expected)
        assert error(found, expected) < 1e-2, config


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 4096), (64, 5120), (7, 2056), (97, 4096)])
def test_the_embedding_comes_with_the_first_norm(rows: int, hidden: int) -> None:
    embedding, weight = draw(50, hidden), draw(hidden)
    ids = torch.randint(50, (rows,), dtype=torch.int32, device="cuda")
    residual, following = gemm.embed(ids, embedding, weight)
    assert torch.equal(residual, embedding[ids.long()])
    assert error(following.x, residual.float() * weight.float()) < 1e-2
    assert error(following.square_sums.sum(0)[:rows], residual.float().square().sum(1)) < 1e-4


def test_a_row_that_is_not_a_number_leaves_the_others_alone() -> None:
    rows, n, k = 12, 128, 512
    x, weight, norm_weight = draw(rows, k), draw(n, k), draw(k)
    expected = gemm.normed_linear(norm_of(x, norm_weight, parts=1), EPS, weight)
    x[5] = torch.nan
    found = gemm.normed_linear(norm_of(x, norm_weight, parts=1), EPS, weight)
    others = torch.arange(rows) != 5
    assert torch.equal(found[others], expected[others]) and found[5].isnan().all()


def make_batch(lengths: list[int], max_len: int, block_size: int = BLOCK_SIZE) -> tuple[Batch, int]:
    """Make a CPU batch of decoding rows, 0 being padding, on shuffled blocks; return it with the number of blocks."""
    rows, max_blocks = len(lengths), -(-max_len // block_size)
    batch = Batch.allocate(
        max_tokens=rows, max_rows=rows, num_slots=rows + 1, max_blocks=max_blocks, max_model_len=max_len
    )
    used = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(used) + 1, dtype=torch.int32)[: sum(used)].split(used)
    batch.block_tables.fill_(10**8)
    batch.kv_slots.fill_(-1)
    active = sum(length > 0 for length in lengths)
    batch.query_starts.copy_(torch.arange(rows + 1).clamp(max=active))
    for row, (length, own) in enumerate(zip(lengths, blocks, strict=True)):
        if length:
            batch.row_slots[row] = rows - row
            batch.block_tables[rows - row, : len(own)] = own
            batch.context_lens[row], batch.positions[row] = length, length - 1
            batch.kv_slots[row] = own[-1] * block_size + (length - 1) % block_size
    batch.header[Header.NUM_ROWS] = batch.header[Header.NUM_TOKENS] = batch.header[Header.NUM_DECODE_ROWS] = active
    return batch, sum(used) + 1


def on_gpu(batch: Batch) -> Batch:
    return Batch(**{field.name: getattr(batch, field.name).cuda() for field in dataclasses.fields(batch)})


def attend_reference(
    qkv: Tensor,
    cache: Tensor,
    batch: Batch,
    table: Tensor,
    num_heads: int,
    norm: HeadNorm | None,
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """Attend with the existing references, in float32 but for what the cache keeps; cache is written."""
    active = int(batch.header[Header.NUM_ROWS])
    rotation = table[batch.positions[:active].long()]
    query = rotate_and_store_torch(qkv[:active].clone(), rotation, batch.kv_slots[:active], LayerCache(cache), norm)
    plan = plan_attention(batch, active, block_size, torch.float32)
    expected = torch.zeros(qkv.shape[0], num_heads * query.shape[2])
    expected[:active] = paged_attention(query.float(), LayerCache(cache.float()), plan)
    return expected


@pytest.mark.parametrize(
    "lengths",
    [[1], [15], [16], [17], [300], [2000], [1, 15, 17, 0], [300, 16, 700, 1, 128, 129, 0, 0], [5000, 31]],
    ids=str,
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
    cache = draw(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim)
    expected_cache = cache.cpu()
    expected = attend_reference(qkv.cpu(), expected_cache, batch, table, heads, norm)
    found = decode_attention(qkv, LayerCache(cache), on_gpu(batch), table.cuda(), norm_on_gpu).cpu()
    assert error(found, expected) < 1e-2
    assert error(cache.cpu(), expected_cache) < 1e-3
    untouched = torch.ones(cache.shape[1:3], dtype=torch.bool).flatten()
    untouched[batch.kv_slots[batch.kv_slots >= 0].long()] = False
    assert torch.equal(cache.cpu().flatten(1, 2)[:, untouched], expected_cache.flatten(1, 2)[:, untouched])
    assert not found[int(batch.header[Header.NUM_ROWS]) :].any()


def test_attention_ignores_what_lies_behind_the_last_token() -> None:
    torch.manual_seed(8)
    lengths, kv_heads, head_dim = [1, 15, 16, 33, 700], 2, 128
    batch, num_blocks = make_batch(lengths, 1000)
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), 1000, "cuda")
    qkv, cache = draw(len(lengths), 12 * head_dim), draw(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim)
    expected = decode_attention(qkv, LayerCache(cache.clone()), on_gpu(batch), table)
    for slot, length in zip(batch.kv_slots.tolist(), lengths, strict=True):
        cache.flatten(1, 2)[:, slot : slot + BLOCK_SIZE - (length - 1) % BLOCK_SIZE] = torch.nan
    assert torch.equal(decode_attention(qkv, LayerCache(cache), on_gpu(batch), table), expected)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_any_split_of_the_keys_gives_the_same_attention(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    kv_heads, head_dim, lengths = 2, 64, [1, 130, 16, 511]
    batch, num_blocks = make_batch(lengths, 512, block_size)
    table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), 512, "cpu")
    qkv, cache = draw(len(lengths), 8 * head_dim), draw(2, num_blocks, block_size, kv_heads, head_dim)
    expected = attend_reference(qkv.cpu(), cache.cpu(), batch, table, 4, None, block_size)
    tried = list(tile_configs.list_attention_configs(2, head_dim))
    for config in [AttentionConfig(1, 1, 1), AttentionConfig(1, 1, 7), *tried[:: len(tried) // 4]]:
        monkeypatch.setattr(
            "blink.kernels.gpu.attention.decode.choose_attention_config", lambda *_, config=config: config
        )
        found = decode_attention(qkv, LayerCache(cache.clone()), on_gpu(batch), table.cuda()).cpu()
        assert error(found, expected) < 1e-2, config


class Chain:
    """Two small layers over one residual, as a step runs them."""

    def __init__(self, rows: int) -> None:
        self.tokens = pad(rows)
        torch.manual_seed(5)
        hidden, inter, self.heads, self.kv_heads, head_dim = 1024, 2048, 8, 2, 128
        batch, num_blocks = make_batch([40 * (row % 12 + 1) for row in range(rows)], 512)
        self.batch = on_gpu(batch)
        self.table = make_rotary_table(Rope(theta=1e4, rotary_dim=head_dim).frequencies(), 512, "cuda")
        self.start = draw(rows, hidden)
        self.residual = self.start.clone()
        self.ids = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.cache = LayerCache(draw(2, num_blocks, BLOCK_SIZE, self.kv_heads, head_dim))
        width = (self.heads + 2 * self.kv_heads) * head_dim
        self.norm, self.qkv = draw(hidden), draw(width, hidden, scale=hidden**-0.5)
        self.output, self.gate_up = draw(hidden, 1024, scale=0.03), draw(2 * inter, hidden, scale=0.03)
        self.down = draw(hidden, inter, scale=0.02)

    def run(self) -> None:
        run = self._run_few if len(self.start) <= MAX_GEMV_ROWS else self._run_many
        run()

    def _run_few(self) -> None:
        self.residual.copy_(self.start)
        for _ in range(2):
            qkv = normed_linear(self.residual, self.norm, EPS, self.qkv)
            add_linear(decode_attention(qkv, self.cache, self.batch, self.table), self.output, self.residual)
            add_linear(gated_linear(self.residual, self.norm, EPS, self.gate_up), self.down, self.residual)

    def _run_many(self) -> None:
        self.residual, following = gemm.embed(self.ids, self.start, self.norm, tokens=self.tokens)
        for _ in range(2):
            qkv = gemm.normed_linear(following, EPS, self.qkv)
            attended = decode_attention(qkv, self.cache, self.batch, self.table)
            following = gemm.add_linear(attended, self.output, self.residual, self.norm, tokens=self.tokens)
            gated = gemm.gated_linear(following, EPS, self.gate_up)
            following = gemm.add_linear(gated, self.down, self.residual, self.norm, tokens=self.tokens)

    def capture(self) -> torch.cuda.CUDAGraph:
        self.run()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            self.run()
        graph.instantiate()
        return graph


@pytest.mark.parametrize("rows", [1, 2, 8, 20, 33, 64, 80, 128])
def test_a_replayed_chain_gives_the_bits_of_one_that_waits_between_kernels(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(rows)
    with monkeypatch.context() as patch:

        def launch_alone(*args: object, **options: object) -> None:
            launch(*args, **{**options, "pdl": False})  # pyright: ignore[reportArgumentType]
            torch.cuda.synchronize()

        patch.setattr("blink.kernels.gpu.gemm.gemv.launch", launch_alone)
        patch.setattr("blink.kernels.gpu.gemm.decode.launch", launch_alone)
        patch.setattr("blink.kernels.gpu.gemm.gemm_kernel.launch", launch_alone)
        patch.setattr("blink.kernels.gpu.attention.decode.launch", launch_alone)
        chain.run()
    expected = chain.residual.clone()
    assert expected.isfinite().all() and not torch.equal(expected, chain.start)
    graph = chain.capture()
    for _ in range(200):
        chain.residual.zero_()
        graph.replay()
        assert torch.equal(chain.residual, expected)


def count_pdl_edges(graph: torch.cuda.CUDAGraph) -> int:
    handle = driver.CUgraph(graph.raw_cuda_graph())
    count = driver.cuGraphGetEdges(handle)[-1]
    _, _, edges, _ = driver.cuGraphGetEdges(handle, count)[1:]
    kinds = [edge.type for edge in edges]
    pdl = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return [int(kind) for kind in kinds].count(pdl)


@pytest.mark.parametrize("rows", [1, 8])
def test_edges_between_the_captured_kernels_are_pdl_edges(rows: int) -> None:
    assert count_pdl_edges(Chain(rows).capture()) >= 9  # the first kernel follows a copy


def launch_device_graph(graph: torch.cuda.CUDAGraph) -> None:
    """Launch a graph as one that the device may launch as well."""
    flags = int(driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
    executable = check(driver.cuGraphInstantiate(driver.CUgraph(graph.raw_cuda_graph()), flags))
    stream = torch.cuda.current_stream().cuda_stream
    check(driver.cuGraphUpload(executable, stream))
    check(driver.cuGraphLaunch(executable, stream))
    torch.cuda.synchronize()
    check(driver.cuGraphExecDestroy(executable))


@pytest.mark.parametrize("rows", [2, 16, 96])
def test_a_captured_step_instantiates_for_launches_from_the_device(rows: int) -> None:
    chain = Chain(rows)
    graph = chain.capture()
    chain.residual.zero_()
    graph.replay()
    expected = chain.residual.clone()
    chain.residual.zero_()
    launch_device_graph(graph)
    assert torch.equal(chain.residual, expected)


_PRODUCER = r"""
extern "C" __global__ void produce(unsigned short* to, const unsigned short* from, int count) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now < start + 100000);
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


def produce_late(to: Tensor, source: Tensor) -> None:
    """Copy, but let dependent kernels start 100 us before."""
    device = Device()
    device.set_current()
    code = Program(_PRODUCER, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin")
    kernel = check(driver.cuKernelGetFunction(driver.CUkernel(int(code.get_kernel("produce").handle))))
    values = (to.data_ptr(), source.data_ptr(), to.numel())
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    stream = torch.cuda.current_stream().cuda_stream
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))
    _kept.append(code)


_kept: list[object] = []


@pytest.mark.parametrize("rows", [1, 8, 40, 97])
def test_kernels_wait_for_a_producer_that_lets_them_start_early(rows: int) -> None:
    chain = Chain(rows)
    x, wide = draw(rows, 1024), draw(rows, chain.qkv.shape[0])
    square_sums = torch.ones(1, pad(rows), device="cuda")

    cases: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = [
        (wide, lambda source: decode_attention(source, chain.cache, chain.batch, chain.table)),
        (x, lambda source: gemm.normed_linear(gemm.NormInput(source, square_sums), EPS, chain.qkv)),
        (x, lambda source: gemm.gated_linear(gemm.NormInput(source, square_sums), EPS, chain.gate_up)),
    ]
    if rows <= gemv.MAX_ROWS:
        cases += [
            (x, lambda source: normed_linear(source, chain.norm, EPS, chain.qkv)),
            (x, lambda source: gated_linear(source, chain.norm, EPS, chain.gate_up)),
        ]
    for source, run in cases:
        expected = run(source)
        late = torch.zeros_like(source)
        torch.cuda.synchronize()
        produce_late(late, source)
        assert torch.equal(run(late), expected)
    check_late_addition(chain, x)


def check_late_addition(chain: Chain, x: Tensor) -> None:
    """Add a late GEMM to a residual that exists before."""

    def add(source: Tensor, residual: Tensor) -> None:
        if len(x) <= MAX_GEMV_ROWS:
            add_linear(source, chain.output, residual)
        else:
            gemm.add_linear(source, chain.output, residual, chain.norm, tokens=chain.tokens)

    expected, found, late = chain.start.clone(), chain.start.clone(), torch.zeros_like(x)
    add(x, expected)
    torch.cuda.synchronize()
    produce_late(late, x)
    add(late, found)
    assert torch.equal(found, expected)


def make_decoder(*, qk_norm: bool, bias: bool) -> Decoder:
    attention = make_attention(8, 2, 64, qk_norm="head" if qk_norm else "none", qkv_bias=bias, output_bias=bias)
    spec = make_spec("llama", attention, DenseMlp(size=1024), num_layers=3, rms_norm_eps=EPS)

    def make_layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=1 + draw(512, scale=0.1),
            qkv=draw(768, 512, scale=0.05),
            qkv_bias=draw(768) if bias else None,
            output=draw(512, 512, scale=0.05),
            output_bias=draw(512) if bias else None,
            head_norm=HeadNorm(1 + draw(64, scale=0.1), 1 + draw(64, scale=0.1), EPS) if qk_norm else None,
            mlp_norm=1 + draw(512, scale=0.1),
            mlp=DenseWeights(draw(2048, 512, scale=0.05), draw(512, 1024, scale=0.05)),
        )

    layers = [make_layer() for _ in range(3)]
    return Decoder(spec, draw(1000, 512), layers, 1 + draw(512, scale=0.1), draw(1000, 512, scale=0.05))


@pytest.mark.parametrize(
    "lengths",
    [[1], [17, 300], [300, 16, 41, 0], [*range(1, 400, 17)], [*range(1, 400, 12)], [*range(1, 400, 7)],
     [*range(1, 400, 5), 0, 0, 0], [*range(3, 387, 3)]],
    ids=lambda lengths: f"{len(lengths)} rows",
)  # fmt: skip
@pytest.mark.parametrize(("qk_norm", "bias"), [(False, False), (True, False), (False, True)])
def test_a_decoding_step_gives_the_logits_and_the_cache_of_the_general_one(
    lengths: list[int], qk_norm: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(9)
    decoder = make_decoder(qk_norm=qk_norm, bias=bias)
    rows = len(lengths)
    style = NormStyle.READER if rows <= MAX_GEMV_ROWS else NormStyle.WRITER
    assert plan_of(decoder, rows, block_size=BLOCK_SIZE).norms is style
    host_batch, num_blocks = make_batch(lengths, 512)
    host_batch.input_ids.random_(1000)
    host_batch.block_tables.clamp_(max=num_blocks - 1)
    batch = on_gpu(host_batch)
    cache = fill_cache(decoder.allocate_kv_cache(num_blocks, BLOCK_SIZE))
    twin = clone_cache(cache)
    active = sum(length > 0 for length in lengths)
    monkeypatch.setattr(gpu_device, "MAX_MIXED_TOKENS", 0)
    assert plan_of(decoder, rows, tokens=rows, block_size=BLOCK_SIZE).norms is NormStyle.KERNEL
    expected = Runner(decoder).compute_logits(batch, twin, Bucket(rows, rows))[:active]
    found = Runner(decoder).compute_logits(batch, cache, Bucket(rows, rows, decoding=True))[:active]
    assert error(found, expected) < 3e-2
    assert error(stack_cache(cache), stack_cache(twin)) < 1e-2
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(("prompts", "computed"), [([1, 70, 1, 5], [40, 0, 17, 0]), ([33], [0]), ([9, 12], [100, 3])])
@pytest.mark.parametrize(("qk_norm", "bias"), [(False, True), (True, False)])
def test_a_short_step_with_prompts_gives_the_logits_of_the_general_one(
    prompts: list[int], computed: list[int], qk_norm: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(10)
    decoder = make_decoder(qk_norm=qk_norm, bias=bias)
    logits: list[Tensor] = []
    for most, style in ((gpu_device.MAX_MIXED_TOKENS, NormStyle.WRITER), (0, NormStyle.KERNEL)):
        monkeypatch.setattr(gpu_device, "MAX_MIXED_TOKENS", most)
        assert plan_of(decoder, len(prompts), tokens=sum(prompts)).norms is style
        driver = Driver(decoder)
        for before, tokens in zip(computed, prompts, strict=True):
            driver.add(torch.arange(before + tokens).tolist(), 1)
        fill_cache(driver.kv_cache, torch.Generator("cuda").manual_seed(3))
        for sequence, before in zip(driver.sequences, computed, strict=True):
            sequence.num_computed = before
        logits.append(driver.compute_logits())
    assert error(*logits) < 3e-2
    assert torch.isfinite(logits[0]).all()
