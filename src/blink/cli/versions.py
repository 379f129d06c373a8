# SPDX-License-Identifier: Apache-2.0
"""`blink --version`: the versions of Blink and torch, read from files, since loading torch takes seconds."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from blink import __version__


def describe_versions() -> str:
    """Return a line about Blink, and one about torch."""
    return f"blink {__version__}\n{_describe_torch()}"


def _describe_torch() -> str:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return "torch is not installed: this machine can run frontends"
    cuda = _read_cuda()
    return f"torch {found}, {f'for CUDA {cuda}' if cuda else 'without CUDA'}"


def _read_cuda() -> str:
    """Return the version of CUDA that torch was built for; empty if there is none."""
    spec = find_spec("torch")  # finds the package and loads nothing
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return ""
    match = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", file.read_text(), re.MULTILINE)
    return match[1] if match else ""
