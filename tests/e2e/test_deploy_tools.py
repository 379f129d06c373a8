# SPDX-License-Identifier: Apache-2.0
"""The files under deploy/ as the tools of their field judge them; images are built by hand (docs/containers.md)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
_DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def judge(*command: str | Path) -> None:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    unit = (_DEPLOY / "systemd" / "blink.service").read_text()
    file = tmp_path / "blink.service"
    file.write_text(unit.replace("/opt/blink/bin/blink", sys.executable))  # it looks for the program
    run = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    about_it = [line for line in run.stderr.splitlines() if "blink.service" in line]
    assert run.returncode == 0 and about_it == [], run.stderr
    file.write_text(unit.replace("LimitRTPRIO=50", "LimitRTPRIO=fifty"))
    run = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    assert "blink.service" in run.stderr, "the check would not notice a mistake"


def test_kubernetes_schemas_take_the_manifests() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the Python package kubernetes-validate")
    for document in yaml.safe_load_all((_DEPLOY / "kubernetes" / "blink.yaml").read_text()):
        validate.validate(document, validate.latest_version(), strict=True)
    wrong = next(yaml.safe_load_all((_DEPLOY / "kubernetes" / "blink.yaml").read_text()))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, validate.latest_version(), strict=True)


def test_the_compose_specification_takes_the_file() -> None:
    pytest.importorskip("check_jsonschema", reason="needs the Python package check-jsonschema")
    schema = "vendor.compose-spec"
    judge(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, _DEPLOY / "compose.yaml")
