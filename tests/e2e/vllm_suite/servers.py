# SPDX-License-Identifier: Apache-2.0
"""What vLLM's tests call RemoteOpenAIServer: `blink serve` with the default model, under the name that a test wants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx
import openai
import tokenizers_of_models

from blink.models.weights.files import default_model_path
from ports import free_port
from processes import stop, wait_for

_PATIENCE: Final = 240.0
_HERE: Final = ["--device=cpu", "--cpu-threads=2", "--max-client-share=1"]
# What Blink refuses by name and tests of other things start their server with: how many words follow it.
_NOT_YET: Final = {
    "--enable-lora": 0,
    "--lora-modules": -1,
    "--max-lora-rank": 1,
    "--max-cpu-loras": 1,
    "--max-loras": 1,
    "--max-logprobs": 1,
}
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
        while flags and (count > 0 or (count < 0 and not flags[0].startswith("-"))):
            flags.pop(0)
            count -= 1
    return kept


class ModelConfig:
    """What there is to know of a model that a server runs."""

    def __init__(self, model: str, **_: object) -> None:
        self.model = model

    def get_vocab_size(self) -> int:
        return len(tokenizers_of_models.read_default())


class _Hub:
    """A hub that is not asked: adapters, which are what tests download, are not loaded."""

    def snapshot_download(self, *_: object, **__: object) -> str:
        return str(Path(__file__).parent)


NAMES = {"ModelConfig": ModelConfig, "RemoteOpenAIServer": RemoteOpenAIServer, "hf_api": _Hub}
