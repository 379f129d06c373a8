# SPDX-License-Identifier: Apache-2.0
"""What vLLM's tests call RemoteOpenAIServer: `blink serve` with the default model, under the name that a test wants."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx
import openai
import tokenizers_of_models
import torch

from blink.models.weights.files import default_model_path
from blink.models.weights.source import read_spec
from lora_adapters import write_adapter
from ports import free_port
from processes import stop, wait_for

_PATIENCE: Final = 240.0
_HERE: Final = ["--device=cpu", "--cpu-threads=2", "--max-client-share=1"]
# What Blink refuses by name and tests of other things start their server with: how many words follow it.
_NOT_YET: Final = {"--max-logprobs": 1}
_LENGTH: Final = ("--max-model-len", "--max_model_len")
_MAX_LENGTH: Final = 8192  # of the default model's texts: a flag that asks for more is left out too


class RemoteOpenAIServer:
    """A server until the end of a with statement."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str] = (),
        *,
        env_dict: Mapping[str, str] | None = None,
        override_hf_configs: object = None,
        **_: object,
    ) -> None:
        del override_hf_configs
        tokenizers_of_models.SERVED.add(model)
        self.host, self.port = "127.0.0.1", free_port()
        flags = _without_absent(list(vllm_serve_args))
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        if "--served-model-name" not in flags:
            flags = [f"--served-model-name={model}", *flags]
        folder = model if Path(model).is_dir() else str(default_model_path())
        command = [sys.executable, "-m", "blink", "serve", f"--model={folder}", *flags, *_HERE, f"--port={self.port}"]
        self.proc = subprocess.Popen(command, env={**os.environ, **(env_dict or {})})
        try:
            wait_for(self._is_ready, _PATIENCE)
        except BaseException:
            stop(self.proc)
            raise

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.proc)

    @property
    def url_root(self) -> str:
        return f"http://{Path(self.uds).name}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._for_openai(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._for_openai(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._for_all(options), base_url=self.url_root)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._for_all(options), base_url=self.url_root)

    def _for_openai(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**self._for_all(options), "base_url": self.url_for("v1")}

    def _for_all(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"timeout": 600, "max_retries": 0, "api_key": self.DUMMY_API_KEY, **options}

    def _is_ready(self) -> bool:
        assert self.proc.poll() is None, "the server has ended"
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        try:
            with httpx.Client(transport=transport, trust_env=False) as client:
                return client.get(self.url_for("health")).status_code == 200
        except httpx.TransportError:
            return False


def _without_absent(flags: list[str]) -> list[str]:
    kept: list[str] = []
    while flags:
        flag = flags.pop(0)
        if flag not in _NOT_YET and not (flag in _LENGTH and int(flags[0]) > _MAX_LENGTH):
            kept.append(flag)
            continue
        count = _NOT_YET.get(flag, 1)
        del flags[:count]
    return kept


class ModelConfig:
    """What there is to know of a model that a server runs."""

    def __init__(self, model: str, **_: object) -> None:
        self.model = model

    def get_vocab_size(self) -> int:
        return len(tokenizers_of_models.read_default())


class _Hub:
    """A hub that has what tests download: adapters, each of which is one of random updates for the default model."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return str(_write_default_adapter())


@functools.cache
def _write_default_adapter() -> Path:
    spec = read_spec(default_model_path())
    attention = spec.layers[0].mixer.attention
    assert attention is not None
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(len(spec.layers))]
    weight = torch.empty(attention.heads * attention.head_dim, spec.hidden_size, device="meta")
    folder = Path(tempfile.mkdtemp(prefix="blink-adapter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_adapter(folder, dict.fromkeys(names, weight), seed=1, size=0.01)


NAMES = {"ModelConfig": ModelConfig, "RemoteOpenAIServer": RemoteOpenAIServer, "hf_api": _Hub}
