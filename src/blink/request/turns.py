# SPDX-License-Identifier: Apache-2.0
"""Work that waits, by client: clients take turns, and of one client's the lightest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Turns(Generic[_Item]):
    """A queue of items, each of which may wait in the name of several clients."""

    def __init__(self, weigh: Callable[[_Item], int]) -> None:
        self._weigh = weigh
        self._by_flow: OrderedDict[int, dict[_Item, None]] = OrderedDict()

    def add(self, flow: int, item: _Item) -> None:
        """Let an item wait in a client's name."""
        self._by_flow.setdefault(flow, {})[item] = None

    def discard(self, flow: int, item: _Item) -> None:
        """Let an item no longer wait in a client's name, if it did."""
        items = self._by_flow.get(flow, {})
        items.pop(item, None)
        if not items:
            self._by_flow.pop(flow, None)

    def take(self) -> _Item | None:
        """Remove the next item, whoever it waited for."""
        if not self._by_flow:
            return None
        flow, items = next(iter(self._by_flow.items()))
        self._by_flow.move_to_end(flow)
        item = min(items, key=self._weigh)
        for other in [other for other, theirs in self._by_flow.items() if item in theirs]:
            self.discard(other, item)
        return item
