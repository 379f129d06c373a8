# SPDX-License-Identifier: Apache-2.0
"""Adapters over HTTP: OpenAI's client picks them by `model`; they are listed, loaded, reloaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from lora_adapters import find_targets, write_adapter
from model_families import save_model
from processes import Frontend, run_engine, start_frontend, stop

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
KEY = "key-of-an-admin"
PROMPT = [5] * 40 + [31, 32]
_SIZES = ("--max-num-seqs=8", "--max-num-batched-tokens=64", "--num-gpu-blocks-override=100", "--dtype=float32")


class Site:
    """A server with adapters, and files of more."""

    def __init__(self, folder: Path) -> None:
        model = save_model("llama-3.1", folder / "base")
        self.base, self.folder, self.targets = folder / "base", folder, find_targets(model)

    def write(self, name: str, seed: int, rank: int = 4) -> str:
        return str(write_adapter(self.folder / name, self.targets, seed=seed, rank=rank))


class Clients:
    """What asks the server."""

    def __init__(self, frontend: Frontend) -> None:
        self.http = httpx.Client(
            base_url=frontend.url, timeout=300, trust_env=False, headers={"authorization": f"Bearer {KEY}"}
        )
        self.openai = OpenAI(base_url=f"{frontend.url}/v1", api_key=KEY, max_retries=0)

    def complete(self, model: str) -> list[int]:
        """Return the tokens of a model's answer."""
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = self.openai.completions.create(
            model=model, prompt=PROMPT, max_tokens=10, temperature=0, extra_body=extra
        )
        assert answer.model == model
        return answer.choices[0].model_extra["token_ids"]  # pyright: ignore[reportOptionalSubscript]

    def load(self, name: str, path: str, **more: object) -> httpx.Response:
        return self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})

    def unload(self, name: str) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def list(self) -> dict[str, str | None]:
        """Return the parent of each model."""
        return {card["id"]: card["parent"] for card in self.http.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def clients(site: Site) -> Iterator[Clients]:
    flags = ("--enable-lora", "--max-loras=2")
    first, second = site.write("first", 1), site.write("second", 2)
    modules = [f"--lora-modules=first={first}", f'--lora-modules={{"name": "second", "path": "{second}"}}']
    model = (str(site.base), "--skip-tokenizer-init", "--served-model-name=base")
    with run_engine(*model, *_SIZES, *flags) as engine:
        rights = (f"--api-key={KEY}", "--allow-runtime-lora-updating")
        frontend = start_frontend(engine.region, *model, *flags, *modules, *rights)
        yield Clients(frontend)
        stop(frontend.process)


def test_the_model_field_picks_the_adapter(clients: Clients) -> None:
    assert clients.list() == {"base": None, "first": "base", "second": "base"}
    answers = [clients.complete(model) for model in ("base", "first", "second")]
    assert len({tuple(answer) for answer in answers}) == 3
    assert [clients.complete(model) for model in ("base", "first", "second")] == answers
    refused = clients.http.post("/v1/completions", json={"model": "third", "prompt": PROMPT})
    assert refused.status_code == 404


def test_an_adapter_is_loaded_reloaded_and_unloaded_while_others_serve(clients: Clients, site: Site) -> None:
    base, second = clients.complete("base"), clients.complete("second")
    path = site.write("mine", 1)
    assert clients.load("mine", path).text == "Success: LoRA adapter 'mine' added successfully."
    assert clients.list()["mine"] == "base"
    assert clients.complete("mine") == clients.complete("first")
    site.write("mine", 2)
    assert clients.complete("mine") == clients.complete("first")
    assert clients.load("mine", path).status_code == 400
    assert clients.load("mine", path, load_inplace=True).status_code == 200
    assert clients.complete("mine") == second
    assert clients.unload("mine").text == "Success: LoRA adapter 'mine' removed successfully."
    assert clients.unload("mine").status_code == 404
    assert "mine" not in clients.list()
    assert clients.http.post("/v1/completions", json={"model": "mine", "prompt": PROMPT}).status_code == 404
    assert (clients.complete("base"), clients.complete("second")) == (base, second)


def test_a_bad_adapter_is_a_400_with_the_tensors_name_and_changes_nothing(clients: Clients, site: Site) -> None:
    before, listed = clients.complete("first"), clients.list()
    targets = {"model.layers.0.self_attn.q_proj": site.targets["model.layers.0.self_attn.k_proj"]}
    wrong = str(write_adapter(site.folder / "wrong", targets, seed=1))
    refused = clients.load("wrong", wrong)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "model.layers.0.self_attn.q_proj.lora_B.weight has the shape [64, 4]" in error["message"]
    assert error["param"] == "lora_path"
    for name, path in (("", wrong), ('a"b', wrong), ("base", wrong), ("first", wrong), ("x", "/no/such/folder")):
        assert clients.load(name, path).status_code == 400
    assert clients.load("x", site.write("large", 1, rank=17)).status_code == 400
    assert clients.list() == listed
    assert clients.complete("first") == before


def test_only_who_has_a_key_changes_adapters(clients: Clients, site: Site) -> None:
    body = {"lora_name": "x", "lora_path": site.write("x", 3)}
    for key in ("", "Bearer wrong"):
        refused = clients.http.post("/v1/load_lora_adapter", json=body, headers={"authorization": key})
        assert refused.status_code == 401
    assert "x" not in clients.list()


def test_the_gauge_names_the_adapters_that_run(clients: Clients) -> None:
    def gauge() -> list[str]:
        lines = clients.http.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("vllm:lora_requests_info{")]

    assert len(gauge()) == 1
    assert 'max_lora="2",running_lora_adapters="",waiting_lora_adapters=""' in gauge()[0]
    extra = {"ignore_eos": True}
    with clients.openai.completions.create(
        model="first", prompt=PROMPT, max_tokens=300, temperature=0, stream=True, extra_body=extra
    ) as stream:
        next(iter(stream))
        assert 'running_lora_adapters="first",waiting_lora_adapters=""' in gauge()[0]


@pytest.mark.long
def test_a_server_that_takes_no_adapters_says_why(site: Site) -> None:
    model = (str(site.base), "--skip-tokenizer-init", "--served-model-name=base")
    with run_engine(*model, *_SIZES, "--enable-lora") as engine:
        for flags, reason in (
            ((f"--api-key={KEY}",), "--enable-lora"),
            ((f"--api-key={KEY}", "--enable-lora"), "--allow-runtime-lora-updating"),
            (("--enable-lora", "--allow-runtime-lora-updating"), "--api-key"),
        ):
            frontend = start_frontend(engine.region, *model, *flags)
            try:
                refused = Clients(frontend).load("first", site.write("first", 1))
                assert refused.status_code == 404
                assert reason in refused.json()["error"]["message"]
            finally:
                stop(frontend.process)
