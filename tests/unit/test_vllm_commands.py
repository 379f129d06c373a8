# SPDX-License-Identifier: Apache-2.0
"""Twenty published command lines of `vllm serve`, with a hub that has a small model of each family."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
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
from harmony_model import TEMPLATE, build_tokenizer
from model_mutations import write_gguf
from stub_hub import Repository, StubHub, serve_hub

pytestmark = pytest.mark.usefixtures("hub")

_SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512}
_MODELS: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "facebook/opt-125m": {"model_type": "opt"},
    "Qwen/Qwen3-8B": {"model_type": "qwen3"},
    "Qwen/Qwen2.5-7B-Instruct": {"model_type": "qwen2"},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": {"model_type": "qwen2"},
    "google/gemma-3-4b-it": {"model_type": "gemma3", "text_config": {**_SMALL, **_GEMMA, "model_type": "gemma3_text"}},
    "mistralai/Mistral-Small-24B-Instruct-2501": {"model_type": "mistral"},
    "Qwen/Qwen3-30B-A3B": {"model_type": "qwen3_moe", **_EXPERTS},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": {"model_type": "qwen3_moe", **_EXPERTS},
    "microsoft/Phi-4-mini-instruct": {"model_type": "phi3", "pad_token_id": 0},
    "NousResearch/Meta-Llama-3-8B-Instruct": {"model_type": "llama"},
    "meta-llama/Llama-3.1-8B-Instruct": {"model_type": "llama"},
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": {"model_type": "mistral", "quantization_config": _AWQ},
}
_GGUF = "unsloth/Qwen3-0.6B-GGUF"

STARTING = [
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-8B --enable-reasoning --reasoning-parser deepseek_r1",
    "Qwen/Qwen2.5-7B-Instruct --tensor-parallel-size 1 --gpu-memory-utilization 0.9 --max-model-len 32768",
    "Qwen/Qwen2.5-7B-Instruct -tp 1 -q fp8 --max_num_seqs 64 --swap-space 4",
    "google/gemma-3-4b-it --dtype bfloat16 --trust-remote-code",
    "mistralai/Mistral-Small-24B-Instruct-2501 --tokenizer_mode mistral --config_format mistral --load_format mistral"
    " --tool-call-parser mistral --enable-auto-tool-choice --limit-mm-per-prompt image=10 -tp 1",
    "Qwen/Qwen3-30B-A3B --max-model-len 131072 --rope-scaling"
    """ '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'""",
    "microsoft/Phi-4-mini-instruct --trust-remote-code --enable-chunked-prefill --swap-space 4",
    "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123 --generation-config vllm",
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ --quantization awq",
    "{folder} --served-model-name llama gpt-4 --disable-log-requests",
    "--model {folder} --host 0.0.0.0 --port 8000 --uvicorn-log-level warning",
    "--config {file}",
    f"{_GGUF}:Q4_K_M",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct --enable-auto-tool-choice --tool-call-parser qwen3_coder",
    "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json"
    " --chat-template examples/tool_chat_template_llama3.1_json.jinja",
]
REFUSED = [
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B --tensor-parallel-size 2 --max-model-len 32768 --enforce-eager", "GPUs"),
    (
        "meta-llama/Llama-3.1-8B-Instruct --compilation-config '{\"level\": 3}'"
        ' --speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\'',
        "not yet: speculation",
    ),
    ("meta-llama/Llama-3.1-8B-Instruct --enable-lora --lora-modules sql=org/sql-lora", "not yet: LoRA"),
    ("facebook/opt-125m", "model type 'opt' is not supported"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubHub]:
    folder = tmp_path_factory.mktemp("tokenizer")
    parts = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>"}).encode(),
        "generation_config.json": b'{"temperature": 0.25, "eos_token_id": 1}',
        "model.safetensors": b"weights",
    }
    write_gguf(folder / "model.gguf")
    with serve_hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name, config in _MODELS.items():
            plain = "{{ messages[-1].content }}"
            template = {"chat_template.jinja": (TEMPLATE if "gpt-oss" in name else plain).encode()}
            files = {"config.json": json.dumps(_SMALL | config).encode(), **parts, **template}
            hub.repositories[name] = Repository(files)
        hub.repositories[_GGUF] = Repository({"Qwen3-0.6B-Q4_K_M.gguf": (folder / "model.gguf").read_bytes()})
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield hub


def configure(command: str, folder: Path) -> ServeConfig:
    """Do what `blink serve` does before it starts its processes."""
    if "{f" in command:
        file = folder / "serve.yaml"
        (folder / "config.json").write_text(json.dumps(_SMALL | {"model_type": "llama"}))
        (folder / "tokenizer.json").write_bytes(_tokenizer())
        file.write_text(f"model: {folder}\nmax-model-len: 4k\nenforce-eager: true\ntensor-parallel-size: 1\n")
        command = command.format(folder=folder, file=file)
    config = build_config(ServeConfig, cli.parse(["serve", *shlex.split(command)]))
    model = localize(config.engine.model)
    return replace(config, engine=replace(config.engine, model=model), frontend=replace(config.frontend, model=model))


def describe(model: ModelConfig) -> ModelSpec:
    """Do what an engine does before it loads weights."""
    check_method(Path(model.model), model.quantization)
    return read_spec(Path(model.model), parse_object("hf_overrides", model.hf_overrides))


@cache
def _tokenizer() -> bytes:
    return build_tokenizer().to_str().encode()


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
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is not supported: fewer GPUs"):
        LLM("Qwen/Qwen3-8B", tensor_parallel_size=2)


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


@pytest.mark.parametrize("name", ["TheBloke/Mistral-7B-Instruct-v0.2-AWQ", "Qwen/Qwen3-8B", _GGUF])
def test_a_method_that_the_model_does_not_name_is_refused(name: str) -> None:
    path = Path(localize(ModelConfig(model=name)).model)
    for method in ("gptq", "compressed-tensors", "bitsandbytes"):
        with pytest.raises(ConfigError, match=f"--quantization {method}"):
            check_method(path, method)
