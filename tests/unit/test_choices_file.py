# SPDX-License-Identifier: Apache-2.0
"""The file that keeps which ways to compute were chosen."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from blink.kernels.gpu import choices

CHOSEN: choices.Choices = {"bfloat16 224 x 4096 x 6144": bytes(range(64)).hex(), "bfloat16 8 x 64 x 64": None}


def test_each_machine_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "new" / "products.json"
    assert choices._read(path, "one") == {}
    choices._write(path, "one", CHOSEN)
    choices._write(path, "other", {"bfloat16 1 x 1 x 1": None})
    assert choices._read(path, "one") == CHOSEN
    assert choices._read(path, "other") == {"bfloat16 1 x 1 x 1": None}
    assert choices._read(path, "third") == {}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"one": []}', '{"one": 3}', '{"one": {"a": 3}}'])
def test_a_damaged_file_costs_a_warning_and_is_replaced(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "blink.engine"):
        assert choices._read(path, "one") == {}
    assert str(path) in caplog.text
    choices._write(path, "one", CHOSEN)
    assert choices._read(path, "one") == CHOSEN


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "blink.engine"):
        choices._write(tmp_path / "file" / "products.json", "one", CHOSEN)
    assert "cannot write" in caplog.text
