# SPDX-License-Identifier: Apache-2.0
"""Parts of a command's help, by vLLM's forms of --help."""

from __future__ import annotations

import pytest

from blink.cli import main as cli


def help_on(capsys: pytest.CaptureFixture[str], topic: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "some/model", f"--help={topic}"])
    assert not end.value.code
    return capsys.readouterr().out


def test_all_is_what_help_prints(capsys: pytest.CaptureFixture[str]) -> None:
    everything = help_on(capsys, "all")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert everything == capsys.readouterr().out == help_on(capsys, "page")


@pytest.mark.parametrize("topic", ["model", "ModelConfig", "modelconfig"])
def test_a_group_is_printed_alone(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    text = help_on(capsys, topic)
    assert "--max-model-len" in text and "--port" not in text


def test_groups_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_on(capsys, "listgroup").splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "model",
        "engine",
        "rdma",
        "offload",
        "lora",
        "frontend",
        "serve",
        "sample",
    ]


@pytest.mark.parametrize(
    ("topic", "has", "lacks"),
    [
        ("max-model-len", "--max-model-len", "--max-num-seqs"),
        ("--max_model_len", "--max-model-len", "--max-num-seqs"),
        ("max", "--max-num-seqs", "--port"),
    ],
)
def test_flags_are_found_by_their_names(capsys: pytest.CaptureFixture[str], topic: str, has: str, lacks: str) -> None:
    text = help_on(capsys, topic)
    assert has in text and lacks not in text


@pytest.mark.parametrize("topic", ["", "no-such-thing"])
def test_what_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", f"--help={topic}"])
    assert end.value.code == 2 and "--help=listgroup" in capsys.readouterr().err
