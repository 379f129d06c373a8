# SPDX-License-Identifier: Apache-2.0
"""What `make` would install and run on machines with and without an NVIDIA driver; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

_ROOT = Path(__file__).resolve().parents[2]
_LISTS_A_GPU = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'"
_FINDS_NO_DRIVER = 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9'


class Machine:
    """A machine whose driver is what the test says, with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        self._programs = folder / "bin"
        self._files = [folder / "version", folder / "nvidia0"]
        self._programs.mkdir()
        self.venv.mkdir()
        self.install_nvidia_smi("exit 127")

    def install_nvidia_smi(self, script: str) -> None:
        program = self._programs / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def load_driver(self, num_files: int) -> None:
        for path in self._files[:num_files]:
            path.touch()

    def stamp(self, *names: str) -> None:
        for name in names:
            (self.venv / name).touch()

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        files = " ".join(map(str, self._files))
        foreign = ("DEVICE", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of the make that runs the tests
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        return subprocess.run(
            ["make", f"VENV={self.venv}", f"NVIDIA_FILES={files}", *arguments],
            cwd=_ROOT,
            env={**kept, "PATH": f"{self._programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def plan(self, *arguments: str) -> str:
        """Return the commands that make would run."""
        run = self.make("-n", *arguments)
        assert run.returncode == 0, run.stderr
        return run.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_driver_the_cpu_build_is_installed_and_serves(machine: Machine) -> None:
    machine.install_nvidia_smi(_FINDS_NO_DRIVER)
    assert machine.make("print-device").stdout == "Blink runs on the CPU (DEVICE=cpu): there is no NVIDIA driver.\n"
    plan = machine.plan("serve")
    assert "+cpu'" in plan and "'.[engine]'" in plan and "--device cpu" in plan
    assert "gpu]" not in plan and "--device cuda" not in plan


@pytest.mark.parametrize("target", ["serve", "demo"])
def test_with_a_driver_the_gpu_extra_is_installed_and_serves(machine: Machine, target: str) -> None:
    machine.install_nvidia_smi(_LISTS_A_GPU)
    assert machine.make("print-device").stdout == "Blink runs on the GPU (DEVICE=cuda): there is an NVIDIA driver.\n"
    plan = machine.plan(target)
    assert "'.[gpu]'" in plan and "--device cuda" in plan and "+cpu'" not in plan
    assert "Blink runs on the GPU" in plan


def test_the_kernels_files_tell_of_a_driver_too_but_not_without_a_device(machine: Machine) -> None:
    machine.load_driver(1)
    assert "DEVICE=cpu" in machine.make("print-device").stdout
    machine.load_driver(2)
    assert "DEVICE=cuda" in machine.make("print-device").stdout


def test_device_overrides_what_was_found(machine: Machine) -> None:
    assert "'.[gpu]'" in machine.plan("serve", "DEVICE=cuda")
    machine.install_nvidia_smi(_LISTS_A_GPU)
    assert "'.[engine]'" in machine.plan("serve", "DEVICE=cpu")
    wrong = machine.make("print-device", "DEVICE=tpu")
    assert wrong.returncode != 0 and "cpu or cuda" in wrong.stderr


def test_an_installed_kind_is_kept_and_the_other_replaces_it(machine: Machine) -> None:
    machine.stamp(".made", ".tools", ".torch-cpu", ".engine-cpu")
    assert "pip" not in machine.plan("serve", "DEVICE=cpu")
    plan = machine.plan("serve", "DEVICE=cuda")
    assert f"rm -f {machine.venv}/.*-cpu" in plan and "uninstall --quiet --yes torch" in plan
    assert plan.index("uninstall") < plan.index("'torch==") < plan.index("'.[gpu]'")


def test_what_serves_gets_no_build_tools(machine: Machine) -> None:
    serving = machine.plan("serve", "DEVICE=cpu")
    assert "cmake" not in serving and "--no-build-isolation" not in serving and "-m venv" in serving
    assert "scikit-build-core cmake ninja" in machine.plan("test", "DEVICE=cpu")
    machine.stamp(".made", ".tools")
    assert "--no-build-isolation" in machine.plan("serve", "DEVICE=cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "target", ["serve", "flat", "test", "test-all", "wheel", "mutants", "pins", "update-pins", "outdated", "native"]
)
def test_all_that_is_installed_has_the_version_that_is_known_to_work(
    machine: Machine, target: str, device: str
) -> None:
    plan = machine.plan(target, f"DEVICE={device}")
    installs = [line for line in plan.replace("\\\n", " ").splitlines() if "pip" in line and " install " in line]
    assert installs
    for line in installs:
        assert line.count(" install --constraint constraints") == line.count(" install "), line


def test_long_tests_have_pins_of_their_own(machine: Machine) -> None:
    plan = machine.plan("test-all", "DEVICE=cpu")
    line = next(line for line in plan.splitlines() if "clients" in line and "install" in line)
    assert "--constraint constraints-clients.txt" in line and "'.[engine,dev,clients,ray,eval]'" in line
    assert "--constraint constraints-cpu.txt" in line, "triton's version is there"


def test_flat_serves_the_model_itself_or_measures_the_server_that_is_named(machine: Machine) -> None:
    on_gpu = machine.plan("flat", "DEVICE=cuda", "FULL=1", "MODEL=m", "ARGS=--seed 3", "FLAT=--runs 2")
    assert "benchmarks/flat/run.py --full --runs 2 -- m --device cuda --seed 3" in " ".join(on_gpu.split())
    assert "--rates 1 " in machine.plan("flat", "DEVICE=cpu")
    [of_url] = [line for line in machine.plan("flat", "URL=http://a:1").splitlines() if "run.py" in line]
    assert of_url.split("run.py")[1].split() == ["--url", "http://a:1"]


def test_gpu_tests_name_what_they_need_instead_of_being_skipped(machine: Machine) -> None:
    run = machine.make("test-gpu")
    assert run.returncode != 0
    assert "make test-gpu needs an NVIDIA GPU with its driver" in run.stderr


def test_byte_code_is_stored_whatever_the_environment_says(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    probe = machine.make("--eval", 'probe: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"', "probe")
    assert probe.stdout == "[]\n", probe.stderr
