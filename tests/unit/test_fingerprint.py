# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of deterministic answers: it changes with what decides their bits, and clients get it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from blink.config import EngineConfig, FrontendConfig, ModelConfig
from blink.engine.cpu import CpuEngine
from blink.engine.determinism import find_fingerprint, is_deterministic
from blink.text.assets import load_assets
from fake_engine import FakeServer
from small_tokenizer import MODEL
from tiny_model import write_tiny_model

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def fingerprint(path: Path, block_size: int = 16, **options: Any) -> str:
    return find_fingerprint(ModelConfig(model=str(path), **options), block_size)


def test_the_fingerprint_is_that_of_the_files_wherever_they_lie(tmp_path: Path) -> None:
    one, other = (write_tiny_model(tmp_path / name) for name in ("one", "other"))
    found = fingerprint(one)
    assert fingerprint(other) == found and found.startswith("cpu-") and len(found.encode()) < 32
    config = other / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 123456.0}))
    assert fingerprint(other) != found


def test_the_fingerprint_changes_with_options_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path)
    found = [fingerprint(path), fingerprint(path, dtype="float32"), fingerprint(path, 32)]
    found.append(fingerprint(path, hf_overrides='{"rope_theta": 5.0}'))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.append(fingerprint(path))
    assert len(set(found)) == len(found)


def test_vllm_s_variable_is_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_deterministic(EngineConfig()) and is_deterministic(EngineConfig(deterministic=True))
    monkeypatch.setitem(os.environ, "VLLM_BATCH_INVARIANT", "1")
    assert is_deterministic(EngineConfig())


def test_other_weights_keep_the_guarantee_and_tell_their_own_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blink.engine.determinism.check_deterministic", lambda *_: None)
    first, other = (
        ModelConfig(model=str(write_tiny_model(tmp_path / name)), load_format="dummy", max_model_len=128)
        for name in "ab"
    )
    note = tmp_path / "b" / "generation_config.json"
    note.write_text("{}")
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 2}
    engine = CpuEngine(
        EngineConfig(model=first, region=f"bits-{os.getpid()}", device="cpu", deterministic=True, **sizes)
    )
    region = vars(engine)["_region"]
    try:
        assert bytes(region.header["fingerprint"]).decode() == find_fingerprint(first, 16)
        engine.load_weights(engine.open_weights(other, ()))
        assert vars(engine)["_runner"].deterministic
        told = bytes(region.header["fingerprint"]).decode()
        assert told == find_fingerprint(other, 16) != find_fingerprint(first, 16)
    finally:
        region.remove()


@pytest.mark.parametrize("told", ["", "cpu-0123456789abcdef"])
def test_answers_tell_the_fingerprint(told: str, tmp_path: Path) -> None:
    config = FrontendConfig(model=MODEL, region="test-fingerprint")
    server = FakeServer(config, load_assets(config), tmp_path)
    server.engine.fingerprint = told
    whole = server.post("/v1/chat/completions", CHAT).json()
    assert whole["system_fingerprint"] == (told or None)
    server.post("/v1/chat/completions", {**CHAT, "stream": True})
    lines = server.writer.written.decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks and all(chunk.get("system_fingerprint", "") == told for chunk in chunks)
    server.close()
