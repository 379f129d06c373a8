# SPDX-License-Identifier: Apache-2.0
"""A request that says nothing is sampled as its model's files, its flags or the default model's card say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from blink.config import FrontendConfig, ModelConfig
from blink.models.weights.files import default_model_path
from blink.text.assets import load_assets
from blink.text.default_sampling import read_default_sampling
from fake_engine import FakeServer
from small_tokenizer import MODEL

CARD = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 30}
FIELDS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}


def ask(tmp_path: Path, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return what the engine is asked for, by a server of a model with a generation_config.json."""
    folder = Path(shutil.copytree(MODEL.model, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **CARD}))
    config = FrontendConfig(model=ModelConfig(model=str(folder), **options), region="test-defaults")
    server = FakeServer(config, load_assets(config), tmp_path)
    assert server.post("/v1/chat/completions", body).status_code == 200
    server.close()
    params = server.engine.submitted[0].params
    return {name: getattr(params, name) for name in FIELDS}


@pytest.mark.parametrize(
    ("options", "body", "expected"),
    [
        ({}, {}, (0.6, 0.95, 20, 1.0, 30)),
        ({}, {"temperature": 1.5, "top_k": 0, "max_tokens": 7}, (1.5, 0.95, 0, 1.0, 7)),
        ({"generation_config": "vllm"}, {}, (1.0, 1.0, 0, 1.0, 100)),
        ({"override_generation_config": '{"temperature": 0.1}'}, {}, (0.1, 0.95, 20, 1.0, 30)),
        ({"override_generation_config": '{"repetition_penalty": 1.2}'}, {"top_p": 1}, (0.6, 1.0, 20, 1.2, 30)),
    ],
)
def test_what_a_request_leaves_out_comes_from_the_model(
    tmp_path: Path, options: dict[str, Any], body: dict[str, Any], expected: tuple[float, ...]
) -> None:
    assert tuple(ask(tmp_path, CHAT | body, **options).values()) == expected


def test_the_default_model_is_sampled_as_its_card_says() -> None:
    assert read_default_sampling(default_model_path(), ModelConfig()) == {"temperature": 0.2, "top_p": 0.9}
    changes = ModelConfig(override_generation_config='{"top_p": 1}')
    assert read_default_sampling(default_model_path(), changes) == {"temperature": 0.2, "top_p": 1}
    assert read_default_sampling(default_model_path(), ModelConfig(generation_config="vllm")) == {}
    assert read_default_sampling(default_model_path().with_name("other.gguf"), ModelConfig()) == {}
