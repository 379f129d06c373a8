# SPDX-License-Identifier: Apache-2.0
"""Serve's request router for engines: where the prompt's beginning is cached, unless that replica has much more to do.

It runs in the ingress and decides by the call's points, the replicas' load and whether their engine is there.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from blink.ray.call import Call
from blink.request.prefix_table import PrefixTable

_MAX_IMBALANCE = 16  # requests that a replica with the prompt's beginning may have beyond the least loaded one


class EngineRouter(RequestRouter):
    """Choose by prefix if so asked, then by load, then by chance."""

    def initialize_state(self, **kwargs: bool) -> None:
        """Take `request_router_kwargs`, of which there is one: `by_prefix`. Called once."""
        self._by_prefix = kwargs["by_prefix"]
        self._table = PrefixTable[str]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas, the best first; Serve takes the next rank where all of one are full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # before the same ranks are tried again
        call = _call_of(pending_request)
        usable = [each for each in candidate_replicas if _is_usable(each, call)]
        if not usable:
            return [candidate_replicas]
        best = self._best(usable, call)
        others = [each for each in usable if each is not best]
        rest = [each for each in candidate_replicas if each not in usable]
        return [rank for rank in ([best], others, rest) if rank]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Remember who has the prompt."""
        del result
        if self._by_prefix:
            self._table.add(_call_of(pending_request).points, replica_id.unique_id)

    def _best(self, replicas: list[RunningReplica], call: Call) -> RunningReplica:
        loads = {each.replica_id.unique_id: self._load(each) for each in replicas}
        bound = min(loads.values()) + _MAX_IMBALANCE
        cached, _ = self._table.longest(call.points, loads)
        near = [each for each in replicas if each.replica_id.unique_id in cached]
        near = [each for each in near if loads[each.replica_id.unique_id] <= bound]

        def rank(replica: RunningReplica) -> tuple[float, int, float]:
            name = replica.replica_id.unique_id
            return loads[name], self._table.size(name), random.random()

        return min(near or replicas, key=rank)

    def _load(self, replica: RunningReplica) -> float:
        known = self.replica_queue_len_cache.get(replica.replica_id)
        return known if known is not None else replica.routing_stats.get("load", 0.0)


def _call_of(request: PendingRequest) -> Call:
    call = request.args[0]
    assert isinstance(call, Call)
    return call


def _is_usable(replica: RunningReplica, call: Call) -> bool:
    is_ready = replica.routing_stats.get("is_ready", True)
    return is_ready and replica.replica_id.unique_id not in call.avoided
