# SPDX-License-Identifier: Apache-2.0
"""Which tests share a process under `pytest -n`."""

from __future__ import annotations

from pathlib import PurePath

WAITING = "waiting"
_WAITING_FOLDERS = {"e2e", "early", "rdma"}


def group_of(nodeid: str) -> str:
    """Return the group of a test: one for all that wait for servers and programs, else its file."""
    file = nodeid.partition("::")[0]
    return WAITING if PurePath(file).parent.name in _WAITING_FOLDERS else file
