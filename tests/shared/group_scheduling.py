# SPDX-License-Identifier: Apache-2.0
"""How pytest-xdist deals the groups of tests."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from groups import group_of


class GroupScheduling(LoadScopeScheduling):
    """Give each process one group after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
