# SPDX-License-Identifier: Apache-2.0
"""Every example runs against one server of a tiny model, whose words mean nothing: what is printed must have its form.

tests/unit/test_example_files.py holds in the gate that they are short and stand in the table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mtp_layers
from blink.models.weights.files import default_model_path
from eagle_heads import write_clockwork
from example_programs import FOLDER, list_examples
from lora_adapters import write_adapter
from make_tokenizer import FOLDER as TOKENIZER
from model_families import save_model
from pooling_models import save_embedder
from ports import free_port
from processes import Engine, Frontend, run_engine, start_frontend, stop
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


def run_example(name: str, *arguments: str, url: str = "", **variables: str) -> str:
    """Run an example to its end and return what it printed."""
    environment = {**os.environ, **variables, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    command = [sys.executable, FOLDER / name, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def need(package: str, reason: str) -> None:
    if find_spec(package) is None:
        pytest.skip(reason)


def test_every_example_has_a_test_here() -> None:
    tested = {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")}
    assert {path.name for path in list_examples()} - tested == set()


def test_chat_stream(tiny_server: Frontend) -> None:
    printed = run_example("chat_stream.py", url=tiny_server.url)
    usage = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) tokens in, (\d+) out\]", printed)]
    assert len(usage) == 2 and all(0 < out <= 64 for _, out in usage)
    assert usage[1][0] > usage[0][0], "the second prompt holds the first answer"


def test_structured_json(tiny_server: Frontend) -> None:
    printed = run_example("structured_json.py", url=tiny_server.url)
    text, _, angry = printed.rpartition("angry: ")
    ticket = json.loads(text)
    assert ticket["product"] in ("router", "phone", "television") and 1 <= ticket["urgency"] <= 5
    assert angry.strip() in ("yes", "no")


def test_predicted_edit(tmp_path: Path) -> None:
    """Words of random weights come from no code: what is predicted is tried, and given up."""
    speculative = '--speculative-config={"method": "ngram", "prompt_lookup_min": 1}'
    flags = (speculative, "--load-format=dummy", "--num-gpu-blocks-override=256", f"--tokenizer={default_model_path()}")
    with run_engine(str(write_tiny_model(tmp_path)), *flags) as engine:
        frontend = start_frontend(engine.region, f"--tokenizer={default_model_path()}")
        printed = run_example("predicted_edit.py", url=frontend.url)
        stop(frontend.process)
    found = re.findall(r"^\[160 tokens in [\d.]+ s; predicted: (\d+) kept, (\d+) given up\]$", printed, re.MULTILINE)
    assert len(found) == 2 and found[0] == ("0", "0") and int(found[1][1]) > 0
    answers = re.split(r"^\[160 tokens .*\]\n", printed, flags=re.MULTILINE)
    assert answers[0] == answers[1]


def test_draft_head(tmp_path: Path) -> None:
    """The model's text is a walk through its tokens that the head knows."""
    model, head = write_clockwork(tmp_path, 1024, range(1024))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model)
    printed = run_example("draft_head.py", str(model), str(head))
    found = re.findall(r": (\d+) tokens in (\d+) steps; (\d+) drafted tokens accepted$", printed, re.MULTILINE)
    (tokens, steps, none), (again, fewer, accepted) = (tuple(map(int, each)) for each in found)
    assert tokens == again and none == 0 and accepted > tokens // 3 and fewer < steps
    assert printed.endswith("the answers are equal\n")


def test_draft_head_without_a_head(tmp_path: Path) -> None:
    """The model's own draft layer knows the walk."""
    model = mtp_layers.write_clockwork(tmp_path / "model", 1024, noise=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model)
    printed = run_example("draft_head.py", str(model))
    found = re.findall(r": (\d+) tokens in (\d+) steps; (\d+) drafted tokens accepted$", printed, re.MULTILINE)
    (tokens, steps, none), (again, fewer, accepted) = (tuple(map(int, each)) for each in found)
    assert tokens == again and none == 0 and accepted > tokens // 3 and fewer < steps
    assert printed.endswith("the answers are equal\n")


def test_tools_agent(tiny_server: Frontend) -> None:
    printed = run_example("tools_agent.py", url=tiny_server.url)
    calls = re.findall(r"temperature\(\{'city': '(Paris|Rome)'\}\) -> .*\"celsius\": (\d+)", printed)
    assert calls and {*calls} <= {("Paris", "18"), ("Rome", "27")}, printed


def test_logprobs_scoring(tiny_server: Frontend) -> None:
    lines = run_example("logprobs_scoring.py", url=tiny_server.url).splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True) and scores[0] < 0


def test_lora_adapters(tmp_path: Path) -> None:
    shapes = {"q_proj": (32, 32), "o_proj": (32, 32), "k_proj": (16, 32)}
    targets = {f"model.layers.0.self_attn.{name}": torch.empty(shape) for name, shape in shapes.items()}
    adapter = write_adapter(tmp_path / "adapter", targets, seed=1, size=3.0)
    model = (
        str(write_tiny_model(tmp_path / "tiny")),
        f"--tokenizer={default_model_path()}",
        "--served-model-name=tiny",
    )
    sizes = ("--load-format=dummy", "--max-model-len=512", "--num-gpu-blocks-override=200", "--enable-lora")
    with run_engine(*model, *sizes) as engine:
        frontend = start_frontend(engine.region, *model, "--enable-lora", f"--lora-modules=mine={adapter}")
        try:
            base, mine = run_example("lora_adapters.py", "Once", url=frontend.url).splitlines()
        finally:
            stop(frontend.process)
    assert base.startswith("tiny (base model): ") and mine.startswith("mine (adapter of tiny): ")
    assert base.partition(": ")[2] != mine.partition(": ")[2]


def test_rl_loop(tmp_path: Path) -> None:
    save_model("llama-3.1", tmp_path)
    lines = run_example("rl_loop.py", str(tmp_path), "30").splitlines()
    rewards = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_embeddings_search(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    with run_engine(str(tmp_path)) as engine:
        frontend = start_frontend(engine.region, f"--model={tmp_path}")
        printed = run_example("embeddings_search.py", url=frontend.url)
        stop(frontend.process)
    found = re.findall(r"^'.+\?': '.+' \((-?[01]\.\d{3})\)$", printed, re.MULTILINE)
    assert len(found) == 2 and all(-1 <= float(score) <= 1.001 for score in found)


def test_two_classes(tiny_server: Frontend) -> None:
    printed = run_example("two_classes.py", url=tiny_server.url)
    assert len(re.findall(r"^interactive: first token after \d", printed, re.MULTILINE)) == 3
    assert "batch: 16 answers" in printed


def test_rag_cache_salt(tiny_server: Frontend) -> None:
    printed = run_example("rag_cache_salt.py", url=tiny_server.url)
    cached = [int(number) for number in re.findall(r"(\d+) of \d+ prompt tokens were cached", printed)]
    assert cached[0] == cached[2] == 0, "a salt of its own finds nothing of others"
    assert cached[1] == cached[3] > 200


def test_kv_events(tmp_path: Path) -> None:
    need("zmq", "the extra 'kv-events' is not installed")
    save_model("llama-3.1", tmp_path)
    ports = free_port(), free_port()
    settings = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    model = (str(tmp_path), "--skip-tokenizer-init")
    with run_engine(*model, f"--kv-events-config={json.dumps(settings)}") as engine:
        frontend = start_frontend(engine.region, *model)
        endpoints = {"KV_EVENTS": f"tcp://127.0.0.1:{ports[0]}", "KV_REPLAY": f"tcp://127.0.0.1:{ports[1]}"}
        printed = run_example("kv_events.py", url=frontend.url, **endpoints)
        stop(frontend.process)
    found = [(int(a), int(b)) for a, b in re.findall(r"predicted (\d+) cached, found (\d+)", printed)]
    assert found == [(0, 0), (64, 64), (48, 48), (0, 0)]


def test_kv_offload() -> None:
    printed = run_example("kv_offload.py")
    cached = [int(number) for number in re.findall(r"(\d+) prompt tokens were cached", printed)]
    assert cached[1] > 1000 > cached[0] and "the answers are equal" in printed


def test_langchain_app(tiny_server: Frontend) -> None:
    need("langchain_openai", "the extra 'clients' is not installed")
    printed = run_example("langchain_app.py", url=tiny_server.url)
    assert re.search(r"sentiment='(good|bad|mixed)'", printed)


def test_anthropic_client(tiny_server: Frontend) -> None:
    need("anthropic", "the extra 'clients' is not installed")
    printed = run_example("anthropic_client.py", url=tiny_server.url)
    assert re.search(r"^\[\d+ tokens\]$", printed, re.MULTILINE)
    assert re.search(r"^forecast\(.*'(Paris|Rome)'.*\)$", printed, re.MULTILINE)


def test_custom_frontend(tiny_engine: Engine) -> None:
    *_, line = run_example("custom_frontend.py", tiny_engine.region).splitlines()
    tokens = [int(token) for token in line.split()]
    assert len(tokens) == 8 and all(0 <= token < 49152 for token in tokens)
    assert run_example("custom_frontend.py", tiny_engine.region).splitlines()[-1] == line, "greedy"


def test_offline_batch() -> None:
    lines = run_example("offline_batch.py").splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(answers) == 8
    assert "Paris" in answers[0]["text"]


def test_tensor_parallel() -> None:
    printed = run_example("tensor_parallel.py")
    assert printed.count(", as one rank") == 3 and "Paris" in printed


def test_data_parallel(tiny_server: Frontend) -> None:
    printed = run_example("data_parallel.py", url=tiny_server.url)
    turns = re.findall(
        r"^conversation \d: cached prompt tokens by turn \[(\d+), (\d+), (\d+)\]$", printed, re.MULTILINE
    )
    assert len(turns) == 8 and all(0 < int(second) <= int(third) for _, second, third in turns)
    assert re.search(r"^engine 0: \d+ tokens$", printed, re.MULTILINE)


def test_ray_cluster() -> None:
    need("ray", "needs the extra ray")
    printed = run_example("ray_cluster.py", str(free_port()))
    assert re.search(r"^Paris -> .+$", printed, re.MULTILINE) and re.search(r"^Rome -> .+$", printed, re.MULTILINE)
