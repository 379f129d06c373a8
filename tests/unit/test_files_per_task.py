# SPDX-License-Identifier: Apache-2.0
"""How many files of the product a task touches: what was built is counted, what is not built yet is listed.

A task that is built has a regex that only its files have. One that is pending lists the files that it will change and
those that it will add; who builds it gives it a regex instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parents[2] / "src" / "blink"
_SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp"}
_MARGIN = 2


@dataclass(frozen=True)
class Built:
    """An example of a task, and how many files it may have: kernels of its own are among them."""

    task: str
    pattern: str
    most: int


@dataclass(frozen=True)
class Pending:
    """A task to come: the files that it will change, and what it will add."""

    task: str
    most: int  # of changed files
    changed: tuple[str, ...]
    added: tuple[str, ...]  # files or folders


BUILT = [
    Built("a number format: MXFP4", r"(?i)mxfp4", 2 + 1),
    Built("an endpoint: /detokenize", r"DetokenizeBody|answer_detokenize", 1 + 3),
    Built("a model family: Granite", r"    granite,|\"granite\": Family", 1),
    Built("a kernel: 4 bits of prompts", r"INT4_PREFILL|multiply_prompts", 3),
    Built("a recurrent layer: gated delta-net", r"GatedDeltaNet|\bdelta_rule\b|delta_decode", 6 + 6),
    Built("rows that verify drafts", r"kVerify|\bspec_tokens\b", 6 + 2),
    # Through all of the API, the region and the scheduler: an adapter is a part of a request's identity.
    Built("LoRA adapters", r"(?i)\badapters?\b|AdapterId|AdapterWords|AdapterUse|\blora\b", 36 + 15),
    Built("a sampling parameter: min_p", r"\bmin_p\b", 2 + 1),
]
PENDING = [
    Pending(
        "tensor parallel",
        6,
        (
            "config.py",
            "csrc/device/scheduler_kernel.cu",
            "engine/gpu.py",
            "runner/gpu_streams.py",
            "models/spec.py",
            "models/weights/decoder_loader.py",
        ),
        ("engine/ranks.py", "csrc/device/ranks.h"),
    ),
]


def find_files(pattern: str) -> list[str]:
    """Return the product's files that a regex occurs in."""
    paths = (path for path in _PACKAGE.rglob("*") if path.suffix in _SUFFIXES)
    return sorted(str(path.relative_to(_PACKAGE)) for path in paths if re.search(pattern, path.read_text()))


@pytest.mark.parametrize("built", BUILT, ids=lambda built: built.task)
def test_a_task_touches_few_files(built: Built) -> None:
    found = find_files(built.pattern)
    assert 0 < len(found) <= built.most + _MARGIN, found


@pytest.mark.parametrize("pending", PENDING, ids=lambda pending: pending.task)
def test_a_task_to_come_has_its_files_listed(pending: Pending) -> None:
    assert [name for name in pending.changed if not (_PACKAGE / name).is_file()] == []
    assert len(set(pending.changed)) <= pending.most + _MARGIN
    built = [name for name in pending.added if (_PACKAGE / name).exists()]
    assert built == [], "it is being built: give the task a regex among BUILT"
