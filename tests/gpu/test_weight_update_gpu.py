# SPDX-License-Identifier: Apache-2.0
"""New weights on a GPU engine: its tokens are those of one that was booted with them, in any format and by any way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from blink import LLM, SamplingParams
from blink.api.admin.ipc_handles import read_handles
from blink.async_llm import AsyncLLM
from blink.engine import weight_group
from blink.engine.gpu_weights import GpuWeights
from blink.errors import BadRequestError, ConfigError, EngineUnavailableError
from blink.link.model_orders import ask_begin, ask_broadcast, ask_commit, ask_join, ask_leave, ask_share, ask_update
from blink.models.weights.overwriting import Overwrite
from blink.models.weights.source import read_spec
from blink.request.source import TokensPrompt
from engine_load import Load
from engine_process import connect, run_engine_process, stopped
from gguf_conversion import convert
from model_families import save_model
from ports import free_port
from quantized_checkpoints import write_checkpoints
from turned_weights import PROMPT, drop_tensor, generate, turn_weights
from weight_trainer import GROUP, describe_weights, list_weights, share_weights, start_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 400,
    "device": "cuda",
    "dtype": "bfloat16",
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_SAFETENSORS = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
Write = Callable[[Path], Path]


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **(OPTIONS | options))


def boot(path: Path, **options: Any) -> list[int]:
    with open_llm(path, **options) as llm:
        return generate(llm)


def region_of(llm: LLM) -> str:
    return llm._engine.config.engine.region


def family(name: str) -> Write:
    def write(folder: Path) -> Path:
        save_model(name, folder)
        return folder

    return write


def quantized(scheme: str, **changes: Any) -> Write:
    return lambda folder: write_checkpoints(folder, scheme, **changes)[0]


FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    "tied": (family("llama-3.1"), {}),
    "tied-float32": (family("llama-3.1"), {"dtype": "float32"}),
    "experts": (family("qwen3_moe"), {}),
    "recurrent": (family("qwen3_5"), {}),
    "latent": (family("deepseek_v3"), {}),
    "inputs": (family("gemma4"), {}),
    "inputs-host": (family("gemma4"), {"per_layer_embeddings": "host"}),
    "mxfp4": (family("gpt_oss"), {}),
    "rounded-fp8": (quantized("fp8-channel"), {"quantization": "fp8"}),
    "fp8-block": (quantized("fp8-block"), {}),
    "fp8-cache": (quantized("fp8-channel"), {"kv_cache_dtype": "fp8"}),
    "int4": (quantized("awq"), {}),
    "int4-arrays": (quantized("gptq-32"), {}),
    "int4-experts": (quantized("packed", **EXPERTS), {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_from_disk_are_those_of_a_boot(name: str, tmp_path: Path) -> None:
    write, options = FORMATS[name]
    first = write(tmp_path / "first")
    second = turn_weights(first, tmp_path / "second")
    of_first, of_second = boot(first, **options), boot(second, **options)
    assert of_first != of_second
    with open_llm(first, **options) as llm:
        assert generate(llm) == of_first
        for path, wanted in ((second, of_second), (first, of_first), (second, of_second)):
            llm.update_weights_from_disk(str(path))
            assert generate(llm) == wanted


def test_so_are_those_of_a_gguf_file(tmp_path: Path) -> None:
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0]
    _, plain = write_checkpoints(tmp_path, "awq")
    files = list[Path]()
    for folder in (plain, turn_weights(plain, tmp_path / "second")):
        files.append(folder / "model.gguf")
        convert(folder, files[-1], gguf.MODEL_ARCH.QWEN3, read_spec(folder), kinds)
    options = {"dtype": "auto"}
    of_first, of_second = (boot(path, **options) for path in files)
    assert of_first != of_second
    with open_llm(files[0], **options) as llm:
        llm.update_weights_from_disk(str(files[1]))
        assert generate(llm) == of_second
        with pytest.raises(BadRequestError):
            llm.update_weights_from_disk(str(plain))
        assert generate(llm) == of_second


class Site:
    """Models on disk, and the tokens of two of them."""

    def __init__(self, folder: Path) -> None:
        self.first = folder / "first"
        save_model("llama-3.1", self.first)
        self.second = turn_weights(self.first, folder / "second")
        self.damaged = drop_tensor(self.first, folder / "damaged", "layers.2.mlp.down")
        self.weights = list_weights(self.second)
        self.of_first, self.of_second = (boot(path, dtype="float32") for path in (self.first, self.second))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def llm(site: Site) -> Iterator[LLM]:
    with open_llm(site.first, dtype="float32") as llm:
        yield llm


def test_tensors_of_a_stream_come_over_those_of_the_files(site: Site, llm: LLM) -> None:
    pairs = [*site.weights.items()]
    llm.update_weights_from_tensor(pairs[::2])
    assert generate(llm) not in (site.of_first, site.of_second)
    llm.update_weights_from_tensor(pairs[1::2])
    assert generate(llm) == site.of_second


def test_a_damaged_checkpoint_is_refused_and_nothing_changes(site: Site, llm: LLM) -> None:
    with pytest.raises(BadRequestError, match=r"layers\.2\.mlp\.down"):
        llm.update_weights_from_disk(str(site.damaged))
    assert not llm.is_paused() and generate(llm) == site.of_first


def test_an_update_that_breaks_off_leaves_the_weights_undefined(
    site: Site, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = Overwrite.take, list[int]()

    def break_off(self: Overwrite, pairs: list[tuple[Tensor, Tensor]]) -> None:
        taken.append(len(pairs))
        if len(taken) > 3:
            raise ConfigError("the disk is gone")
        take(self, pairs)

    monkeypatch.setattr(Overwrite, "take", break_off)
    with pytest.raises(BadRequestError, match="the disk is gone"):
        llm.update_weights_from_disk(str(site.second))
    with pytest.raises(BadRequestError, match="weights are undefined"):
        llm.resume()
    with pytest.raises(EngineUnavailableError):
        generate(llm)
    monkeypatch.setattr(Overwrite, "take", take)
    llm.update_weights_from_disk(str(site.second))
    assert generate(llm) == site.of_second


def test_sleep_is_refused_before_anything_is_paused(site: Site, llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="does not sleep"):
        llm.sleep(2)
    assert not llm.is_paused() and generate(llm) == site.of_first


def test_cycles_of_updates_leave_memory_as_it_was(site: Site, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    load, free = GpuWeights.load_weights, list[int]()

    def look(self: GpuWeights, source: Any) -> None:  # while the GPU may be asked
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
        load(self, source)

    monkeypatch.setattr(GpuWeights, "load_weights", look)
    for index in range(20):
        llm.update_weights_from_disk(str((site.second, site.first)[index % 2]))
    assert free[-1] >= free[2] - (2 << 20), free
    assert generate(llm) == site.of_first


def test_a_kept_sequence_that_is_retracted_goes_on_with_the_new_weights(site: Site) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)

    async def scene() -> tuple[list[int], int]:
        async with AsyncLLM(str(site.first), **(OPTIONS | {"dtype": "float32"})) as llm:
            tokens, told = list[int](), asyncio.Event()

            async def read() -> None:
                async for output in llm.generate(PROMPT, params, "a"):
                    tokens[:] = output.outputs[0].token_ids
                    told.set()

            reader = asyncio.create_task(read())
            await told.wait()
            await llm.pause_generation(mode="keep")
            await asyncio.sleep(0.2)
            before = len(tokens)
            await llm.update_weights_from_disk(str(site.second))
            assert len(tokens) == before < 300
            await llm.pause_generation(mode="retract")
            await llm.resume_generation()
            await reader
            return tokens, before

    tokens, before = asyncio.run(asyncio.wait_for(scene(), 200))
    with open_llm(site.second, dtype="float32") as llm:
        prompt = TokensPrompt(prompt_token_ids=[*PROMPT["prompt_token_ids"], *tokens[:before]])
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=300 - before, ignore_eos=True))
    assert tokens[before:] == list(output.outputs[0].token_ids)


def test_a_server_goes_on_with_a_stopped_host_after_an_update(tmp_path: Path) -> None:
    flags = "--dtype=float32", "--num-gpu-blocks-override=4096"
    with run_engine_process(tmp_path, *flags) as (process, region):
        client = connect(region, process)
        whole = Load(client)
        whole.wait(whole.has_ended)
        for _ in range(2):
            load = Load(client)
            load.wait(load.has_begun)
            with ThreadPoolExecutor(1) as pool:
                start = time.monotonic()
                update = pool.submit(ask_update, region, str(tmp_path), "dummy", clears_cache=True)
                load.wait(update.done)
                update.result()
                print(f"an update of the same random weights took {time.monotonic() - start:.3f} s")
            with stopped(process):
                load.wait(load.has_ended)
                assert [*load.tokens.values()] == [*whole.tokens.values()]
                after = Load(client)
                after.wait(after.has_ended)
                assert [*after.tokens.values()] == [*whole.tokens.values()]
        client.close()


def test_tensors_in_another_process_on_the_gpu_are_read_by_their_handles(site: Site, llm: LLM) -> None:
    with share_weights(site.second) as told:
        names = [(name, _SAFETENSORS[kind], shape) for name, kind, shape in told.tensors]
        handles = read_handles(told.pickled, len(names))
        with pytest.raises(BadRequestError, match="engine's GPU"):
            ask_share(region_of(llm), names, [{"GPU-0": next(iter(one.values()))} for one in handles])
        assert generate(llm) == site.of_first
        ask_begin(region_of(llm))
        assert ask_share(region_of(llm), names, handles)
        assert generate(llm) == site.of_first
        ask_commit(region_of(llm), clears_cache=True)
        assert generate(llm) == site.of_second
    with pytest.raises(BadRequestError, match="trainer's memory"):
        ask_share(region_of(llm), names, handles)  # it has ended
    assert generate(llm) == site.of_second


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_trainers_broadcast_gives_its_weights(site: Site, llm: LLM, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    region, port, told = region_of(llm), free_port(), describe_weights(site.second)
    types = [_SAFETENSORS[one] for one in told["dtypes"]]
    tensors = [*zip(told["names"], types, told["shapes"], strict=True)]
    trainer = start_trainer(site.second, port, backend=backend)
    try:
        ask_join(region, GROUP, "127.0.0.1", port, 1, 2, backend)
        assert generate(llm) == site.of_first
        ask_begin(region)
        ask_broadcast(region, GROUP, tensors)
        assert generate(llm) == site.of_first
        ask_commit(region, clears_cache=True)
        assert generate(llm) == site.of_second
        ask_leave(region, GROUP)  # first: with NCCL a trainer that leaves waits for the engine
        assert trainer.wait(60) == 0
        assert generate(llm) == site.of_second
    finally:
        trainer.kill()


def test_a_trainer_that_is_killed_ends_its_broadcast_with_nccl(
    site: Site, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(weight_group, "_WAIT", timedelta(seconds=8))
    region, port, told = region_of(llm), free_port(), describe_weights(site.second)
    types = [_SAFETENSORS[one] for one in told["dtypes"]]
    trainer = start_trainer(site.second, port, 3, backend="nccl")
    try:
        ask_join(region, GROUP, "127.0.0.1", port, 1, 2, "nccl")
        with pytest.raises(BadRequestError, match="broadcast of"):
            ask_broadcast(region, GROUP, [*zip(told["names"], types, told["shapes"], strict=True)])
    finally:
        trainer.kill()
        trainer.wait(60)
    assert generate(llm) == site.of_first
