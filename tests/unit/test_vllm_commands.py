# SPDX-License-Identifier: Apache-2.0
"""Twenty published command lines of `vllm serve`: all is read, and run by tests/e2e/test_published_commands.py."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from blink import LLM, SamplingParams
from blink.cli import main as cli
from blink.cli.flags import build_config
from blink.config import FrontendConfig, ModelConfig, ServeConfig, parse_object
from blink.engine.thread import EngineThread
from blink.errors import ConfigError
from blink.hub.localize import localize
from blink.models.spec import ModelSpec
from blink.models.weights.source import check_method, read_spec
from blink.text.assets import load_assets
from published_commands import (
    CONFIGS,
    GGUF,
    NO_TENSORS,
    REFUSED,
    STARTING,
    fill_in,
    make_gguf_repository,
    make_repository,
)
from stub_hub import StubHub, serve_hub

pytestmark = pytest.mark.usefixtures("hub")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubHub]:
    with serve_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.repositories |= {name: make_repository(name, {"model.safetensors": NO_TENSORS}) for name in CONFIGS}
        hub.repositories[GGUF] = make_gguf_repository(tmp_path_factory.mktemp("gguf"))
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield hub


def configure(command: str, folder: Path) -> ServeConfig:
    """Do what `blink serve` does before it starts its processes."""
    config = build_config(ServeConfig, cli.parse(["serve", *shlex.split(fill_in(command, folder))]))
    model = localize(config.engine.model)
    return replace(config, engine=replace(config.engine, model=model), frontend=replace(config.frontend, model=model))


def describe(model: ModelConfig) -> ModelSpec:
    """Do what an engine does before it loads weights."""
    check_method(Path(model.model), model.quantization)
    return read_spec(Path(model.model), parse_object("hf_overrides", model.hf_overrides))


@pytest.mark.parametrize("command", STARTING)
def test_a_published_command_is_taken(command: str, tmp_path: Path) -> None:
    config = configure(command, tmp_path)
    assert config.engine.model.max_model_len <= describe(config.engine.model).max_model_len
    load_assets(config.frontend)


@pytest.mark.parametrize(("command", "reason"), REFUSED)
def test_a_published_command_is_refused_by_its_reason(
    command: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigError)) as caught:
        describe(configure(command, tmp_path).engine.model)
    assert reason in (capsys.readouterr().err + str(caught.value))


def test_there_are_twenty() -> None:
    assert len(STARTING) + len(REFUSED) == 20


@pytest.mark.parametrize("command", [STARTING[4], STARTING[6]])
def test_a_published_command_starts_an_engine(command: str, tmp_path: Path) -> None:
    config = configure(f"{command} --load-format dummy --device cpu --max-num-seqs 2", tmp_path).engine
    engine = EngineThread(
        replace(config, region=f"test-{tmp_path.name}", num_gpu_blocks_override=10_000, cpu_threads=1)
    )
    engine.stop()


def test_a_script_for_vllm_generates() -> None:
    options = {"tensor_parallel_size": 1, "trust_remote_code": True, "enforce_eager": True, "dtype": "float"}
    sizes = {"max_model_len": 64, "num_gpu_blocks_override": 64, "cpu_threads": 1, "load_format": "dummy"}
    with LLM("Qwen/Qwen3-8B", revision="v1", device="cpu", **options, **sizes) as model:
        [output] = model.generate("Hi", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2 is not supported: fewer GPUs"):
        LLM("Qwen/Qwen3-8B", pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("command", "length"),
    [
        (STARTING[6], 131072),
        ("google/gemma-3-4b-it --hf-overrides.max_position_embeddings 77", 77),
        ("google/gemma-3-4b-it --hf-overrides.text_config.max_position_embeddings 78", 78),
    ],
)
def test_overrides_are_of_the_models_config(command: str, length: int, tmp_path: Path) -> None:
    assert describe(configure(command, tmp_path).engine.model).max_model_len == length


@pytest.mark.parametrize(
    ("options", "defaults"),
    [
        ({}, {"temperature": 0.25}),
        ({"generation_config": "vllm"}, {}),
        ({"override_generation_config": '{"top_k": 7}'}, {"temperature": 0.25, "top_k": 7}),
        ({"generation_config": "vllm", "override_generation_config": '{"temperature": 0.5}'}, {"temperature": 0.5}),
        ({"generation_config": "vllm", "override_generation_config": '{"max_new_tokens": 9}'}, {"max_tokens": 9}),
    ],
)
def test_default_sampling_is_as_the_flags_say(options: dict[str, Any], defaults: dict[str, Any]) -> None:
    model = localize(ModelConfig(model="Qwen/Qwen3-8B", skip_tokenizer_init=True, **options))
    assert load_assets(FrontendConfig(model=model)).sampling_defaults == defaults


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"override_generation_config": '{"top_q": 7}'}, "--override-generation-config: top_q is not supported"),
        ({"override_generation_config": '{"temperature": -1}'}, "--override-generation-config is malformed"),
        ({"override_generation_config": '{"max_new_tokens": 0}'}, "--override-generation-config is malformed"),
        ({"override_generation_config": '{"max_new_tokens": "9"}'}, "--override-generation-config is malformed"),
        ({"generation_config": "/no/such"}, "--generation-config /no/such is no folder"),
    ],
)
def test_other_sampling_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    model = localize(ModelConfig(model="Qwen/Qwen3-8B", skip_tokenizer_init=True, **options))
    with pytest.raises(ConfigError, match=reason):
        load_assets(FrontendConfig(model=model))


@pytest.mark.parametrize("name", ["TheBloke/Mistral-7B-Instruct-v0.2-AWQ", "Qwen/Qwen3-8B", GGUF])
def test_a_method_that_the_model_does_not_name_is_refused(name: str) -> None:
    path = Path(localize(ModelConfig(model=name)).model)
    for method in ("gptq", "compressed-tensors", "bitsandbytes"):
        with pytest.raises(ConfigError, match=f"--quantization {method}"):
            check_method(path, method)
