# SPDX-License-Identifier: Apache-2.0
"""What must hold of any scheduler, whatever it decides: a plain model that judges completions and single steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blink.region.layout import CONSTANTS, CqeKind, FinishReason, SequenceStatus
from blink.sampling_params import SamplingParams
from harness import Completion, expected_tokens

FREE, WAITING, RUNNING = SequenceStatus.FREE, SequenceStatus.WAITING, SequenceStatus.RUNNING
_NO_SLOT = 0xFFFFFFFF


@dataclass
class Request:
    """One submitted sequence: what it must yield, and what of it has come."""

    prompt: list[int]
    stops: frozenset[int]
    params: SamplingParams
    answer: list[int]
    reason: FinishReason
    known: list[int] = field(default_factory=list[int])  # the tokens whose blocks it may leave in the cache
    delivered: int = 0
    top_logprobs: int = 0
    admitted: bool = False
    cancelled: bool = False
    ended: bool = False


def answer_of(
    prompt: list[int], stops: frozenset[int], params: SamplingParams, vocab_size: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """Return the tokens that a request must yield, and why it ends."""
    assert params.max_tokens is not None
    longest = min(params.max_tokens, max_model_len - len(prompt))
    tokens = expected_tokens(prompt, longest, vocab_size)
    for count, token in enumerate(tokens, 1):
        if count > params.min_tokens and token in stops:
            return tokens[:count], FinishReason.STOP
    return tokens, FinishReason.LENGTH


class Deliveries:
    """Judge every completion of one owner of a queue pair."""

    def __init__(self, vocab_size: int, block_size: int, prompts: list[list[int]]) -> None:
        """`prompts` holds what requests of all owners of all queue pairs may leave in the cache."""
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.prompts = prompts
        self.requests: dict[int, Request] = {}

    def live(self) -> list[int]:
        return [sequence for sequence, request in self.requests.items() if not request.ended]

    def observe(self, completion: Completion) -> None:
        """Take one completion: it must be the next of its sequence, exactly once, with the right values."""
        request = self.requests[int(completion["sequence"])]
        assert not request.ended, "a completion after the last one"
        kind, token = CqeKind(int(completion["kind"])), int(completion["token"])
        request.ended = completion["finish_reason"] != FinishReason.NONE
        if kind == CqeKind.ADMITTED:
            assert not request.admitted, "admitted twice"
            assert token in self._cacheable(request), "more tokens were found in the cache than anybody computed"
            request.admitted = True
        elif kind == CqeKind.TOKEN:
            self._observe_token(request, completion)
        elif kind == CqeKind.TOP_LOGPROB:
            self._observe_top_logprob(request, completion)
        else:
            assert kind == CqeKind.FINISHED, f"{kind.name} for a sound request"
            assert request.cancelled and completion["finish_reason"] == FinishReason.ABORT

    def _cacheable(self, request: Request) -> range:
        """Return the numbers of tokens that can be in the cache: whole blocks that start what another request left."""
        prompt = request.prompt
        blocks = (len(prompt) - 1) // self.block_size
        while blocks and all(
            prompt[: blocks * self.block_size] != other[: blocks * self.block_size]
            for other in self.prompts
            if other is not request.known
        ):
            blocks -= 1
        return range(0, blocks * self.block_size + 1, self.block_size)

    def _observe_token(self, request: Request, completion: Completion) -> None:
        assert request.admitted, "a token before the admission"
        assert int(completion["index"]) == request.delivered, "a token is lost, repeated or out of order"
        token = request.answer[request.delivered]
        assert int(completion["token"]) == token and float(completion["logprob"]) == -token / 8
        assert request.top_logprobs == (request.params.logprobs or 0), "top logprobs are missing"
        request.top_logprobs = 0
        request.delivered += 1
        last = request.delivered == len(request.answer)
        assert completion["finish_reason"] == (request.reason if last else FinishReason.NONE)

    def _observe_top_logprob(self, request: Request, completion: Completion) -> None:
        rank = request.top_logprobs
        token = (request.answer[request.delivered] + rank) % self.vocab_size
        assert (int(completion["rank"]), int(completion["index"])) == (rank, request.delivered)
        assert (int(completion["token"]), float(completion["logprob"])) == (token, -rank)
        request.top_logprobs += 1


def _flows_of(sequences: Any) -> Any:
    return sequences["queue_pair"] * CONSTANTS["flows"] + sequences["sqe"]["flow"] % CONSTANTS["flows"]


def _put_back(before: Any, after: Any) -> Any:
    """Tell which sequences were started in a pass and then lost their blocks to one that goes before them."""
    anew = (before["status"] != RUNNING) & (after["queued_ns"] != before["queued_ns"])
    return (after["status"] == WAITING) & (after["admitted"] != 0) & anew


@dataclass(frozen=True)
class Rules:
    """The sizes that bound a step."""

    sequences_per_queue_pair: int
    max_num_seqs: int
    num_slots: int
    max_num_batched_tokens: int
    max_queue_age_ns: int
    priority_policy: bool


@dataclass
class StepJudge:
    """Compare the sequences before and after a pass: who was started, who had to wait, who was put back."""

    rules: Rules
    # by sequence index, as submitted
    classes: dict[int, int] = field(default_factory=dict[int, int])
    priorities: dict[int, int] = field(default_factory=dict[int, int])
    waited: dict[int, int] = field(default_factory=dict[int, int])  # ns of earlier waits, by sequence index
    since: dict[int, int] = field(default_factory=dict[int, int])  # when the present wait began
    _entitled: set[int] = field(default_factory=set[int])  # flows, in the pass that is judged

    def judge(
        self,
        before: Any,
        after: Any,
        rows: list[tuple[int, int]],
        now: int,
        open_pairs: set[int],
        *,
        arrivals_seen: bool,
        attached: list[bool],
        counters: tuple[Any, Any],
    ) -> None:
        """Judge a composed pass that launched `rows`; `attached` says which queue pairs had an owner.

        `counters` are the flows' tokens before and after the pass.

        `open_pairs` had drained their completions; `arrivals_seen` says whether new entries were read before composing.
        """
        tokens = sum(count for _, count in rows)
        assert tokens <= self.rules.max_num_batched_tokens and len(rows) <= self.rules.max_num_seqs
        ones = [count == 1 for _, count in rows]
        assert ones == sorted(ones, reverse=True), "a chunk stands before a row of one token"
        assert len({index for index, _ in rows}) == len(rows)
        ours = np.isin(after["queue_pair"], list(open_pairs))
        decoding = (after["status"] == RUNNING) & (after["num_tokens"] - after["num_computed"] == 1) & ours
        assert set(np.flatnonzero(decoding)) <= {index for index, _ in rows}, "a decoding sequence was left out"
        may_start = (after["status"] == WAITING) & ours & (after["cancelled"] == 0)
        # A slot that was taken in this pass may have been out of reach until others had started.
        had_slot = (before["status"] == WAITING) & (before["slot"] != _NO_SLOT)
        may_start &= had_slot | np.isin(after["queue_pair"], self._takers(after, attached))
        kept_waiting = (before["status"] == WAITING) & (before["num_blocks"] <= after["num_blocks"])
        may_start &= kept_waiting | (arrivals_seen & (before["status"] == FREE))
        may_start &= ~_put_back(before, after)
        left = [int(index) for index in np.flatnonzero(may_start)]
        self._entitled = self._entitled_flows(before, after)
        self._judge_order(before, after, left, now, counters)
        if tokens < self.rules.max_num_batched_tokens:
            self._judge_preemption(after, left, now)

    def _entitled_flows(self, before: Any, after: Any) -> set[int]:
        """Return the flows whose requests could age all through the pass: they never had their part of the places."""
        ran = (before["status"] == RUNNING) | (after["status"] == RUNNING)
        live = (before["status"] != FREE) | (after["status"] != FREE)
        flows = np.where(after["status"] != FREE, _flows_of(after), _flows_of(before))
        found = set(flows[live].tolist())
        share = max(1, self.rules.max_num_seqs // max(1, len(found)))
        return {flow for flow in found if len(found) == 1 or int((flows[ran] == flow).sum()) < share}

    def _takers(self, after: Any, attached: list[bool]) -> list[int]:
        """Return the queue pairs that could have had one slot more all through the pass, whoever else asked."""
        holders = after["queue_pair"][(after["status"] != FREE) & (after["slot"] != _NO_SLOT)]
        held = np.bincount(holders, minlength=len(attached)).tolist()
        num_slots, count = self.rules.num_slots, max(1, sum(attached))
        free, reserve, share = num_slots - sum(held), max(1, num_slots // 2 // count), max(1, num_slots // count)
        kept = sum(max(0, reserve - have) for have, is_attached in zip(held, attached, strict=True) if is_attached)
        beyond = free > kept
        return [
            pair
            for pair, have in enumerate(held)
            if attached[pair] and free > 0 and (have < reserve or (beyond and have < share))
        ]

    def _judge_order(self, before: Any, after: Any, left: list[int], now: int, counters: tuple[Any, Any]) -> None:
        """Counters only grow in a pass: who started had at least its flow's first, who was left at most its last."""
        flows = _flows_of(after).tolist()
        runs = (after["status"] == RUNNING) & (before["status"] != RUNNING)
        for started in np.flatnonzero(runs | _put_back(before, after)).tolist():
            *tier, arrival = self.rank(after, started, now)
            for index in left:
                *other_tier, other_arrival = self.rank(after, index, now, surely=True)
                assert tier <= other_tier, "a request was started before one that goes first"
                if tier == other_tier and flows[started] == flows[index]:
                    assert arrival < other_arrival, "a flow's requests were started out of order"
                elif tier == other_tier:
                    least, most = counters[0][flows[started]], counters[1][flows[index]]
                    assert least <= most, "a request was started before one of a flow that cost less"

    def _judge_preemption(self, after: Any, left: list[int], now: int) -> None:
        if all(self.rank(after, index, now, surely=True)[:2] == (1, 1) for index in left):
            return
        places = (after["status"] == RUNNING) & (after["num_blocks"] > 0)
        for index in np.flatnonzero(places):
            assert self.rank(after, int(index), now)[:2] != (1, 1), "best-effort runs while a more urgent request waits"

    def rank(self, sequences: Any, index: int, now: int, *, surely: bool = False) -> tuple[int, ...]:
        """Return what decides who goes first beside the flow's cost: age, class, priority, and last the arrival.

        `surely`: only who was entitled to age in the whole of the pass counts as aged.
        """
        q = sequences[index]
        waited = self.waited.get(index, 0) + (now - self.since[index] if index in self.since else 0)
        if waited > self.rules.max_queue_age_ns and not (surely and int(_flows_of(q)) not in self._entitled):
            return (0, int(q["arrival"]))
        return (1, self.classes[index], self.priorities[index] if self.rules.priority_policy else 0, int(q["arrival"]))

    def follow_waits(self, status: Any, now: int) -> None:
        """Measure how long each sequence has waited; to be called after every pass."""
        for index, state in enumerate(status):
            if state == FREE:
                self.waited.pop(index, None)
                self.since.pop(index, None)
            elif state == WAITING:
                self.since.setdefault(index, now)
            elif index in self.since:
                self.waited[index] = self.waited.get(index, 0) + now - self.since.pop(index)
