# SPDX-License-Identifier: Apache-2.0
"""`blink serve org/name` with a hub on loopback, pasted as for vLLM: from download to answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from harmony_model import build_tokenizer
from ports import free_port
from processes import wait_until_healthy
from stub_hub import Repository, serve_hub

pytestmark = pytest.mark.e2e

_SIZE, _WORDS, _PATIENCE = 32, 320, 300.0
_CONFIG = {
    "model_type": "llama",
    "vocab_size": _WORDS,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
}


def tiny_repository(folder: Path, token: str) -> Repository:
    """Return a gated model of one layer, with random weights in two files."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(48)
    layer = "model.layers.0."
    square = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    weights = {f"{layer}{name}.weight": (_SIZE, _SIZE) for name in square}
    norms = [f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"]
    weights |= {f"{name}.weight": (_SIZE,) for name in norms}
    heads = {f"{name}.weight": (_WORDS, _SIZE) for name in ("model.embed_tokens", "lm_head")}
    parts = [
        {name: random.normal(size=shape).astype(np.float32) for name, shape in part.items()}
        for part in (weights, heads)
    ]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
    files = {
        "config.json": json.dumps(_CONFIG).encode(),
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: save(part) for name, part in zip(names, parts, strict=True)},
        "pytorch_model.bin": b"pickle",
    }
    return Repository(files, token=token, is_gated=True)


@pytest.mark.long
def test_a_gated_model_of_the_hub_is_served_with_vllms_flags(tmp_path: Path) -> None:
    with serve_hub() as hub:
        hub.repositories["acme/tiny"] = tiny_repository(tmp_path, "hub-secret")
        port, log = free_port(), tmp_path / "log"
        words = ["serve", "acme/tiny", "--served-model-name", "tiny", "gpt-4", "--max_model_len", "200", "-tp", "1"]
        words += [f"--port={port}", "--enforce-eager", "--cpu-threads=1", "--hf-token", "hub-secret"]
        environment = {**os.environ, **hub.environment(tmp_path), "VLLM_API_KEY": "locked"}
        environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "100")
        command = [sys.executable, "-m", "blink", *words]
        with log.open("w") as output, subprocess.Popen(command, stderr=output, env=environment) as server:
            try:
                ask_a_server(f"http://127.0.0.1:{port}", server)
                check_children(server.pid)
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait(_PATIENCE)
                print(log.read_text())
        assert hub.fetched() == {*hub.repositories["acme/tiny"].files} - {"pytorch_model.bin"}
    assert "these flags have no effect here: --enforce-eager (" in log.read_text()
    assert server.returncode == 0


def ask_a_server(url: str, server: subprocess.Popen[bytes]) -> None:
    """Ask by each of the model's names."""
    key = {"Authorization": "Bearer locked"}
    with httpx.Client(base_url=url, timeout=_PATIENCE, trust_env=False) as client:
        wait_until_healthy(client, server, _PATIENCE)
        assert client.get("/v1/models").status_code == 401
        models = client.get("/v1/models", headers=key).json()["data"]
        assert [model["id"] for model in models] == ["tiny", "gpt-4"]
        body = {"model": "gpt-4", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, headers=key).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 3)


def check_children(server: int) -> None:
    """Look whether the token for the hub went further than the process that needs it."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    assert len(children) == 2
    for child in children:
        assert b"hub-secret" not in Path(f"/proc/{child}/cmdline").read_bytes()
