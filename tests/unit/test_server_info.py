# SPDX-License-Identifier: Apache-2.0
"""/server_info and /tokenizer_info: what they tell, and what they keep to themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from blink.config import FrontendConfig
from blink.text.assets import load_assets
from fake_engine import ENGINE, FakeServer
from small_tokenizer import MODEL

KEY = {"Authorization": "Bearer secret"}
CONFIG = FrontendConfig(
    model=replace(MODEL, hf_token="hf_hidden"),
    region="test-info",
    api_key=("secret",),
    enable_tokenizer_info_endpoint=True,
)


def test_a_server_tells_its_flags_and_no_secret(tmp_path: Path) -> None:
    assets = load_assets(CONFIG)
    server = FakeServer(CONFIG, assets, tmp_path)
    assert server.send("GET", "/server_info").status_code == 401
    answer = server.send("GET", "/server_info", headers=KEY)
    told = answer.json()
    assert told["frontend"]["region"] == "test-info" and told["engine"]["max_model_len"] == ENGINE.max_model_len
    assert "hf_hidden" not in answer.text and '"secret"' not in answer.text and "hash_key" not in answer.text
    tokenizer = server.send("GET", "/tokenizer_info").json()
    assert tokenizer["chat_template"] == assets.template_source and tokenizer["tokenizer_class"]
    server.close()


def test_the_tokenizer_is_told_of_only_where_the_flag_says_so(tmp_path: Path) -> None:
    server = FakeServer(replace(CONFIG, enable_tokenizer_info_endpoint=False), load_assets(CONFIG), tmp_path)
    answer = server.send("GET", "/tokenizer_info")
    assert answer.status_code == 404 and "--enable-tokenizer-info-endpoint" in answer.text
    server.close()
