# SPDX-License-Identifier: Apache-2.0
"""Which tests share a process under `pytest -n`, and a virtual machine."""

from __future__ import annotations

from pathlib import PurePath

WAITING = "waiting"
MACHINE = "machine"  # a property of tests: what the virtual machine that they ran in was made of
_WAITING_FOLDERS = {"e2e", "early", "rdma"}
# Long ones that share no server with others: those that wait would otherwise be the last to end.
_ALONE = {
    "test_arm_wheels.py",
    "test_eagle_drafts.py",
    "test_llm.py",
    "test_recurrent_speculation.py",
    "test_speculation_equality.py",
    "test_structured_llm.py",
    "test_wheel.py",
}


def group_of(nodeid: str) -> str:
    """Return the group of a test: one for all that wait for servers and programs, else its file."""
    file = nodeid.partition("::")[0]
    path = PurePath(file)
    return WAITING if path.parent.name in _WAITING_FOLDERS and path.name not in _ALONE else file
