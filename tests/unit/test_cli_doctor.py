# SPDX-License-Identifier: Apache-2.0
"""`blink doctor` on this machine, and on a machine that lacks something, made so by its environment."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blink.models
from blink.cli import model_fit
from blink.cli.doctor import (
    examine_hardware,
    examine_isolation,
    examine_library,
    examine_model,
    examine_port,
    examine_torch,
)
from blink.cli.model_fit import examine_given_model
from blink.cli.torch_probe import Gpu, TorchReport, probe_torch
from blink.formats.fp8 import FP8
from blink.formats.matrix import QuantizedMatrix
from blink.formats.packed import pack
from blink.formats.schemes import FP8_ROWS, Quantization
from blink.host.isolation import format_cpus
from blink.models.weights.gguf_file import GgufFile
from blink.models.weights.source import read_spec
from small_tokenizer import write_hollow_gguf
from tiny_model import write_tiny_model

# Without the limits and, if it had them, without the capabilities (CAP_IPC_LOCK, CAP_SYS_NICE) that its children need.
_UNPRIVILEGED = """
import ctypes, resource
from blink.cli.doctor import examine_isolation
for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_RTPRIO):
    resource.setrlimit(limit, (0, 0))
for capability in (14, 23):
    ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP
for finding in examine_isolation():
    print(finding.level, finding.subject, finding.advice)
"""


def _run(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blink", "doctor", "--port", "0"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )


def test_machine_that_runs_these_tests_can_serve_and_has_its_torch_reported() -> None:
    run = _run()
    assert run.returncode == 0, run.stdout
    assert run.stdout.endswith("This machine can serve.\n")
    assert "fail" not in {line.split(maxsplit=1)[0] for line in run.stdout.splitlines()}
    assert re.search(rf"^ok +torch: {re.escape(torch.__version__)}$", run.stdout, re.MULTILINE), run.stdout
    assert re.search(r"^\w+ +GPU: ", run.stdout, re.MULTILINE), run.stdout


@pytest.mark.parametrize(("peers", "level"), [((1, 1), "ok"), ((1, 0), "warn")])
def test_gpus_that_reach_each_others_memory_are_told_from_others(
    peers: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(Gpu("H100", 80 << 30, 3e12, 9, 0, count) for count in peers)
    monkeypatch.setattr("blink.cli.doctor.probe_torch", lambda: TorchReport("2.11", gpus))
    [finding] = [finding for finding in examine_torch() if finding.subject == "peers"]
    assert finding.level == level
    assert finding.text.endswith(
        "of all others: 1" if level == "warn" else "each of 2 GPUs reaches the memory of all others"
    )


def test_one_gpu_has_no_peers_to_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blink.cli.doctor.probe_torch", lambda: TorchReport("2.11", (Gpu("H100", 80 << 30, 3e12),)))
    assert all(finding.subject != "peers" for finding in examine_torch())


def test_broken_library_is_a_failure_with_advice(tmp_path: Path) -> None:
    broken = tmp_path / "libblink.so"
    broken.write_bytes(b"not a library")
    run = _run(BLINK_NATIVE_LIBRARY=str(broken))
    assert run.returncode == 1
    [line] = [line for line in run.stdout.splitlines() if line.startswith("fail")]
    assert "native library" in line
    assert str(broken) in line


def test_library_loads() -> None:
    assert [finding.level for finding in examine_library()] == ["ok"]


def test_isolation_is_reported_with_the_cores_that_this_process_may_use() -> None:
    found = {finding.subject: finding for finding in examine_isolation()}
    assert set(found) == {"cores for frontends", "real-time scheduling", "locked memory"}
    assert found["cores for frontends"].text.startswith(f"{format_cpus(os.sched_getaffinity(0))} may be used")


def test_isolation_that_is_not_permitted_is_a_warning_with_advice() -> None:
    run = subprocess.run([sys.executable, "-c", _UNPRIVILEGED], capture_output=True, text=True, timeout=300, check=True)
    realtime, locked = run.stdout.splitlines()[1:]
    assert realtime.startswith("warn real-time scheduling")
    assert "ulimit -r" in realtime
    assert locked.startswith("warn locked memory")
    assert "ulimit -l" in locked


def test_cores_are_those_that_this_process_may_use() -> None:
    [cores, _] = examine_hardware()
    assert cores.text == str(len(os.sched_getaffinity(0)))


def test_model_that_is_not_here_is_a_warning_and_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINK_CACHE", str(tmp_path))
    [finding] = examine_model()
    assert finding.level == "warn"
    assert str(tmp_path) in finding.text
    assert list(tmp_path.iterdir()) == []


def test_taken_port_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        [finding] = examine_port(taken.getsockname()[1])
    assert finding.level == "warn"
    assert "in use" in finding.text


def test_a_model_that_fits_is_described_with_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_hollow_gguf(path)
    found = {finding.subject: finding for finding in examine_given_model(str(path))}
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["model"].text.startswith("Llama, SmolLM2: 0.13 billion parameters, 30 layers")
    assert found["precision"].text.startswith("stored as Q4_1, computed in ")
    if "stay as they are stored" in found["precision"].text:
        weights = sum(tensor.num_bytes for tensor in GgufFile(path).tensors.values()) / 2**30
    else:
        weights = read_spec(path).num_parameters * 2 / 2**30
    assert found["weights"].text.startswith(f"{weights:.2f} GiB of ")
    # Tied embeddings are read whole for each token's logits.
    assert f": {weights:.2f} GiB at " in found["speed"].text


def test_a_model_that_does_not_fit_fails_the_examination(tmp_path: Path) -> None:
    giant = write_tiny_model(tmp_path, hidden_size=1 << 17, intermediate_size=1 << 19, num_hidden_layers=200)
    found = {finding.subject: finding for finding in examine_given_model(str(giant))}
    assert found["weights"].level == "fail"


def test_a_cache_for_less_than_one_sequence_is_a_warning(tmp_path: Path) -> None:
    long = write_tiny_model(tmp_path, max_position_embeddings=2**31 - 1)
    found = {finding.subject: finding for finding in examine_given_model(str(long))}
    assert found["KV cache"].level == "warn"
    assert "--max-model-len" in found["KV cache"].advice


def test_a_cache_in_fp8_holds_more_tokens(tmp_path: Path) -> None:
    found = {finding.subject: finding for finding in examine_given_model(str(write_tiny_model(tmp_path)))}
    wide, narrow = (
        int(text) for text in re.findall(r"(\d+) tokens (?:fit|with --kv-cache-dtype fp8)", found["KV cache"].text)
    )
    assert narrow / wide == pytest.approx(2 if probe_torch().gpus else 4, rel=1e-3)


def test_a_model_of_another_family_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="mamba")
    [finding] = examine_given_model(str(tmp_path))
    assert finding.level == "fail"
    assert "model type 'mamba' is not supported" in finding.text


def test_quantized_matrices_count_as_a_gpu_keeps_them() -> None:
    spec = read_spec(Path(blink.models.__path__[0]) / "configs" / "llama-3-8b")
    matrices = spec.num_matrix_weights
    plain = model_fit.count_weights(spec, 2, stays_quantized=True)
    stored = replace(spec, quantization=Quantization("awq"))
    found = model_fit.count_weights(stored, 2, stays_quantized=True)
    saved = int(matrices * (2 - 0.5 - 4 / 128))
    assert (plain.total - found.total, plain.read - found.read) == (saved, saved)
    assert matrices == 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert model_fit.count_weights(stored, 4, stays_quantized=False).total == 4 * spec.num_parameters
    assert "matrices in 4 bits (AWQ)" in model_fit._describe(stored)


@pytest.mark.parametrize(
    ("quantization", "scales"),
    [(FP8_ROWS, (256, 1)), (Quantization("fp8"), (256, 4)), (Quantization("awq"), (256, 4))],
)
def test_what_a_gpu_keeps_of_a_weight_is_what_is_packed(quantization: Quantization, scales: tuple[int, int]) -> None:
    values = torch.zeros(256, 512, dtype=FP8 if quantization.storage == "fp8" else torch.uint8)
    zeros = None if quantization.storage == "fp8" else torch.zeros(scales, dtype=torch.uint8)
    packed = pack([QuantizedMatrix(values, torch.ones(scales), zeros)])
    of_rows = 0 if quantization.has_groups else 4 * 256  # which do not grow with the columns
    assert packed.nbytes == values.numel() * quantization.kept_bytes + of_rows


def test_a_quantized_output_layer_counts_too() -> None:
    spec = read_spec(Path(blink.models.__path__[0]) / "configs" / "llama-3-8b")
    stored = replace(spec, quantization=Quantization("packed"))
    both = replace(spec, quantization=Quantization("packed", output=FP8_ROWS))
    before, after = (model_fit.count_weights(one, 2, stays_quantized=True) for one in (stored, both))
    head = 128256 * 4096
    assert (before.total - after.total, before.read - after.read) == (head, head)
    assert model_fit.count_weights(both, 4, stays_quantized=False).total == 4 * spec.num_parameters
    tied = [replace(one, tie_embeddings=True) for one in (stored, both)]
    counted = [model_fit.count_weights(one, 2, stays_quantized=True) for one in tied]
    assert counted[0] == counted[1]
    assert "output layer in FP8 per channel" in model_fit._describe(both)
    assert "output layer" not in model_fit._describe(tied[1])
