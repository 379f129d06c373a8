# SPDX-License-Identifier: Apache-2.0
"""The file that keeps which candidates to compute were chosen."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from blink.kernels.gpu import autotuner
from blink.kernels.gpu.gemm import bf16

CHOSEN: autotuner.Choices = {"bfloat16 224 x 4096 x 6144": bytes(range(64)).hex(), "bfloat16 8 x 64 x 64": None}


def test_each_machine_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "new" / "products.json"
    assert autotuner._read(path, "one") == {}
    autotuner._write(path, "one", CHOSEN)
    autotuner._write(path, "other", {"bfloat16 1 x 1 x 1": None})
    assert autotuner._read(path, "one") == CHOSEN
    assert autotuner._read(path, "other") == {"bfloat16 1 x 1 x 1": None}
    assert autotuner._read(path, "third") == {}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"one": []}', '{"one": 3}', '{"one": {"a": 3}}'])
def test_a_damaged_file_costs_a_warning_and_is_replaced(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "blink.engine"):
        assert autotuner._read(path, "one") == {}
    assert str(path) in caplog.text
    autotuner._write(path, "one", CHOSEN)
    assert autotuner._read(path, "one") == CHOSEN


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "blink.engine"):
        autotuner._write(tmp_path / "file" / "products.json", "one", CHOSEN)
    assert "cannot write" in caplog.text


def test_what_the_file_says_is_taken_and_other_codes_are_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, timed = tmp_path / "products.json", list[int]()
    autotuner._write(path, "this one", {"kept": "b", "first": None, "unknown": "0g"})
    monkeypatch.setattr(autotuner, "_chosen", {})
    monkeypatch.setattr(autotuner, "_kept", {})
    monkeypatch.setattr(autotuner, "name_machine", lambda: "this one")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        autotuner, "_time", lambda candidates: [timed.append(way()) or [1.0, 0.9, 0.99][way()] for way in candidates]
    )
    candidates = {"a": lambda: 0, "b": lambda: 1, "c": lambda: 2}

    def find(name: str) -> str | None:
        return autotuner.find(name, lambda: candidates, candidates.__contains__)

    assert find("kept") is None
    with autotuner.tuning(path):
        assert [find("kept"), find("first")] == ["b", None] and not timed
        assert [find("unknown"), find("new"), find("new")] == ["b", "b", "b"] and timed == [0, 1, 2, 0, 1, 2]
        candidates.pop("b")
        assert find("about as fast") is None
    assert autotuner._read(path, "this one") == {
        "kept": "b", "first": None, "unknown": "b", "new": "b", "about as fast": None
    }  # fmt: skip


@pytest.mark.parametrize("code", ["0g", "00", "ff" * 63])
def test_what_has_not_the_bytes_of_an_algorithm_is_none(code: str) -> None:
    assert not bf16._accepts(None, code)  # pyright: ignore[reportArgumentType]
