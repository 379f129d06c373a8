# SPDX-License-Identifier: Apache-2.0
"""Twenty command lines of `vllm serve` as model cards, quickstarts and charts publish them, and a hub for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from harmony_model import TEMPLATE, build_tokenizer
from model_mutations import write_gguf
from stub_hub import Repository

SMALL: dict[str, Any] = {
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
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
_GEMMA = {"query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512}
_GEMMA |= {"tie_word_embeddings": True, "model_type": "gemma3_text"}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "quantization_config": _MXFP4}
CONFIGS: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": {"model_type": "gpt_oss", **_GPT_OSS},
    "facebook/opt-125m": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 64, "num_key_value_heads": 2},
    "Qwen/Qwen3-8B": {"model_type": "qwen3"},
    "Qwen/Qwen2.5-7B-Instruct": {"model_type": "qwen2"},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": {"model_type": "qwen2"},
    "google/gemma-3-4b-it": {"model_type": "gemma3", "text_config": SMALL | _GEMMA},
    "mistralai/Mistral-Small-24B-Instruct-2501": {"model_type": "mistral"},
    "Qwen/Qwen3-30B-A3B": {"model_type": "qwen3_moe", **_EXPERTS},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": {"model_type": "qwen3_moe", **_EXPERTS},
    "microsoft/Phi-4-mini-instruct": {"model_type": "phi3", "pad_token_id": 0},
    "NousResearch/Meta-Llama-3-8B-Instruct": {"model_type": "llama"},
    "meta-llama/Llama-3.1-8B-Instruct": {"model_type": "llama"},
    "TheBloke/Mistral-7B-Instruct-v0.2-AWQ": {"model_type": "mistral", "quantization_config": _AWQ},
}
_PLAIN = "{{ messages[-1].content }}"  # a chat template
NO_TENSORS = len(b"{}").to_bytes(8, "little") + b"{}"  # a safetensors file
GGUF = "unsloth/Qwen3-0.6B-GGUF"

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
    f"{GGUF}:Q4_K_M",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct --enable-auto-tool-choice --tool-call-parser qwen3_coder",
    "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json"
    " --chat-template examples/tool_chat_template_llama3.1_json.jinja",
    "facebook/opt-125m",
]
REFUSED = [
    (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B -pp 2 --max-model-len 32768 --enforce-eager",
        "GPUs",
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct --compilation-config '{\"level\": 3}'"
        ' --speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\'',
        "eagle3 needs a model",
    ),
    ("meta-llama/Llama-3.1-8B-Instruct --enable-lora --fully-sharded-loras", "not yet: adapters"),
]


def make_repository(name: str, weights: Mapping[str, bytes]) -> Repository:
    """Return the repository of one of CONFIGS, with these files of weights."""
    files = {
        "config.json": json.dumps(SMALL | CONFIGS[name]).encode(),
        "chat_template.jinja": (TEMPLATE if "gpt-oss" in name else _PLAIN).encode(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>"}).encode(),
        "generation_config.json": b'{"temperature": 0.25, "eos_token_id": 1}',
    }
    return Repository({**files, **weights})


def make_gguf_repository(folder: Path) -> Repository:
    """Return the repository of GGUF, whose file has weights."""
    write_gguf(folder / "model.gguf")
    return Repository({"Qwen3-0.6B-Q4_K_M.gguf": (folder / "model.gguf").read_bytes()})


def fill_in(command: str, folder: Path) -> str:
    """Return a command with the paths of a model directory, of which this writes all but weights, and of a file."""
    if "{f" not in command:
        return command
    file = folder / "serve.yaml"
    (folder / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    (folder / "tokenizer.json").write_bytes(_tokenizer())
    (folder / "chat_template.jinja").write_text(_PLAIN)
    file.write_text(f"model: {folder}\nmax-model-len: 4k\nenforce-eager: true\ntensor-parallel-size: 1\n")
    return command.format(folder=folder, file=file)


@cache
def _tokenizer() -> bytes:
    return build_tokenizer().to_str().encode()
