# SPDX-License-Identifier: Apache-2.0
"""The scheduler against a plain model of its contract, under random frontends: quick, slow, dying and succeeding ones.

HYPOTHESIS_PROFILE=deep searches for minutes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blink.errors import OverloadedError
from blink.link.queue_pair import NO_HASH_ROOT, QueuePair
from blink.region.layout import EngineState, ErrorCode, Opcode, StepResult
from blink.sampling_params import SamplingParams
from harness import MILLISECOND, Harness, small_config, submission
from model import FREE, RUNNING, Deliveries, Request, Rules, StepJudge, answer_of

PAIRS, TAGS, VOCAB, MAX_MODEL_LEN, BLOCK = 3, 5, 23, 48, 8
LEASE_MS, AGE_MS = 5000, 30000
PAIR = st.integers(0, PAIRS - 1)
PROMPT = st.builds(
    lambda family, shared, tail: [(family * 7 + i) % VOCAB for i in range(shared)] + tail,
    st.integers(0, 1),
    st.integers(0, 40),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
)
PARAMS = st.builds(
    lambda max_tokens, min_tokens, logprobs, best_effort, priority: SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        logprobs=logprobs,
        best_effort=best_effort,
        priority=priority,
    ),
    st.integers(1, 20),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([None, None, 0, 2]),
    st.booleans(),
    st.integers(-1, 1),
)
STOPS = st.frozensets(st.integers(0, VOCAB - 1), max_size=2)


class Owner:
    """One frontend: a queue pair, what it has submitted, and how it behaves."""

    def __init__(self, pair: QueuePair, prompts: list[list[int]]) -> None:
        self.pair = pair
        self.deliveries = Deliveries(VOCAB, BLOCK, prompts)
        self.attached = self.draining = self.alive = True
        self.last_renewal = 0
        self.composed_since_expiry = 0
        self.quick_passes = self.silent_passes = 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.booleans(),
        num_blocks=st.sampled_from([6, 9, 14, 40]),
        max_num_seqs=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([4, 13, 32]),
        segments=st.sampled_from([0, 0, 3]),
        target_ms=st.sampled_from([0, 3]),
        overtake_share=st.sampled_from([0, 500]),
    )
    def boot(
        self,
        policy: str,
        prefix_caching: bool,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        segments: int,
        target_ms: int,
        overtake_share: int,
    ) -> None:
        config = small_config(
            num_queue_pairs=PAIRS,
            max_sequences_per_worker=TAGS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            scheduling_policy=policy,
            enable_prefix_caching=prefix_caching,
            lease_timeout=LEASE_MS / 1000,
            stall_timeout=3600,  # what an unread queue leads to is in test_queue_pairs.py
            max_queue_age=AGE_MS / 1000,
        )
        self.harness = Harness(
            config,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            num_blocks=num_blocks,
            cq_entries=64,
            sq_entries=8,
            segment_ns=MILLISECOND,
            best_effort_share=200,
            overtake_share=overtake_share,
            urgent_tpot_target_ns=target_ms * MILLISECOND,
        )
        self._cut_steps(segments)
        self.awake_ms = 0  # as lease timeouts are measured
        self.prompts: list[list[int]] = []
        self.owners = [Owner(self.harness.frontend(i), self.prompts) for i in range(PAIRS)]
        self.judge = StepJudge(
            Rules(
                sequences_per_queue_pair=TAGS,
                max_num_seqs=max_num_seqs,
                num_slots=int(self.harness.geometry["num_slots"]),
                max_num_batched_tokens=budget,
                max_queue_age_ns=AGE_MS * 1_000_000,
                priority_policy=policy == "priority",
            )
        )
        self.healthy = True

    def _cut_steps(self, segments: int) -> None:
        """Fill the table of costs, by which steps are cut and others pass them; 0: leave it empty.

        Who was left out of a step, and which steps are short, is then for test_scheduler_classes.py to judge.
        """
        self.segments = segments
        for graph in range(int(self.harness.geometry["num_graphs"]) if segments else 0):
            self.harness.costs[graph] = (MILLISECOND * (1 + graph), 0, segments)

    @rule(i=PAIR, prompt=PROMPT, params=PARAMS, stops=STOPS, flow=st.sampled_from([0, 1, 257]), turns=st.booleans())
    def submit(
        self, i: int, prompt: list[int], params: SamplingParams, stops: frozenset[int], flow: int, turns: bool
    ) -> None:
        self._submit(i, prompt, params, stops, flow, turns)

    def _submit(
        self, i: int, prompt: list[int], params: SamplingParams, stops: frozenset[int], flow: int, turns: bool
    ) -> None:
        owner = self.owners[i]
        if not owner.alive or not owner.attached:
            return
        prompt = prompt[: MAX_MODEL_LEN - 1]
        answer, reason = answer_of(prompt, stops, params, VOCAB, MAX_MODEL_LEN)
        try:
            root = self.harness.hash_root() if turns else NO_HASH_ROOT
            hashes = self.harness.hashes(prompt)
            sequence = owner.pair.submit(submission(prompt, tuple(stops), hashes, flow, root), params)
        except OverloadedError:
            return
        known = prompt + answer if turns else [*prompt]
        owner.deliveries.requests[sequence] = Request(prompt, stops, params, answer, reason, known)
        self.prompts.append(known)
        index = i * TAGS + (sequence & 0xFFFFFFFF)
        self.judge.classes[index], self.judge.priorities[index] = int(params.best_effort), params.priority

    @rule(i=PAIR, pick=st.integers(0, 100))
    def cancel(self, i: int, pick: int) -> None:
        owner = self.owners[i]
        if owner.alive and owner.attached and (live := owner.deliveries.live()):
            sequence = live[pick % len(live)]
            owner.pair.cancel(sequence)
            owner.deliveries.requests[sequence].cancelled = True

    @rule(i=PAIR)
    def reset_the_prefix_cache(self, i: int) -> None:
        owner = self.owners[i]
        if owner.alive and owner.attached and owner.pair._sq_room():
            owner.pair.order(Opcode.RESET_PREFIX_CACHE)

    @rule(i=PAIR, pick=st.integers(0, 100))
    def go_on_from_an_answer(self, i: int, pick: int) -> None:
        """Submit what a conversation's next turn would send."""
        requests = [request for owner in self.owners for request in owner.deliveries.requests.values()]
        if requests:
            before = requests[pick % len(requests)]
            self._submit(i, [*before.prompt, *before.answer, pick % VOCAB], before.params, before.stops, 0, True)

    @rule(count=st.integers(1, 6), finish=st.booleans())
    def step(self, count: int, finish: bool) -> None:
        for _ in range(count):
            self._step(1, finish)

    @rule(finish=st.booleans())
    def outlast_the_age_cap(self, finish: bool) -> None:
        self._step(AGE_MS + 1, finish)

    @rule(finish=st.booleans())
    def outlast_the_lease(self, finish: bool) -> None:
        for _ in range(3):  # of a pause, half a lease counts
            self._step(LEASE_MS + 1, finish)

    @rule(i=PAIR)
    def stop_draining(self, i: int) -> None:
        self.owners[i].draining = False

    @rule(i=PAIR)
    def drain_again(self, i: int) -> None:
        self.owners[i].draining = self.owners[i].alive

    @rule(i=PAIR)
    def die(self, i: int) -> None:
        self.owners[i].alive = self.owners[i].draining = False

    @rule(i=PAIR)
    def succeed(self, i: int) -> None:
        self.owners[i] = owner = Owner(self.harness.attach_later(i), self.prompts)
        owner.attached = False

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def finish_step(self) -> None:
        self.harness.finish()

    def _step(self, milliseconds: int, finish: bool) -> None:
        self.healthy = False
        for owner in self.owners:
            self._live(owner)
        costs = self.harness.flows["computed"].copy()
        before, was_in_flight = self.harness.sequences.copy(), self.harness.num_launches > self.harness.num_retired
        result = self.harness.step(milliseconds, finish=finish)
        self.awake_ms += min(milliseconds, LEASE_MS // 2)
        after, now = self.harness.sequences, self.harness.now
        assert result in (StepResult.IDLE, StepResult.BUSY, StepResult.LAUNCHED)
        assert self.harness.error_code == ErrorCode.NONE
        self.judge.follow_waits(after["status"], now)
        if result != StepResult.BUSY and not self.segments:
            rows = self.harness.batch_rows() if result == StepResult.LAUNCHED else []
            quick = {i for i, owner in enumerate(self.owners) if owner.quick_passes > 2}
            attached = (self.harness.queue_pairs["attached"] != 0).tolist()
            if sum(attached) == int(self.harness.scheduler["num_attached"]):  # else they changed after composing
                self.judge.judge(
                    before,
                    after,
                    rows,
                    now,
                    quick,
                    arrivals_seen=not was_in_flight,
                    attached=attached,
                    counters=(costs, self.harness.flows["computed"]),
                )
        self._check_leases(after, result)
        self.healthy = True

    def _live(self, owner: Owner) -> None:
        """Do what a frontend does between two steps."""
        if not owner.attached and owner.pair.is_attached():
            owner.pair.start()
            owner.attached = True
        if owner.alive:
            owner.pair.renew_lease()
        owner.quick_passes = owner.quick_passes + 1 if owner.draining and owner.attached else 0
        if owner.quick_passes:
            for completion in owner.pair.drain():
                owner.deliveries.observe(completion)

    def _check_leases(self, sequences: Any, result: StepResult) -> None:
        """Not every pass reads the frontends' words: a renewal, its absence and the end may each take one more."""
        for i, owner in enumerate(self.owners):
            owner.silent_passes = 0 if owner.alive or not owner.attached else owner.silent_passes + 1
            if owner.silent_passes < 2:
                owner.last_renewal = self.awake_ms
                owner.composed_since_expiry = 0
            elif self.awake_ms - owner.last_renewal > LEASE_MS:
                owner.composed_since_expiry += result != StepResult.BUSY
            # A paused step goes on to its end first, while others may pass it for as long as is their share.
            if owner.composed_since_expiry > (2 if not self.segments else 40):
                assert (sequences["status"][i * TAGS : (i + 1) * TAGS] == FREE).all(), "a dead frontend holds sequences"
                assert not owner.pair.is_attached()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        if self.healthy:
            self._settle()
        self.harness.close()

    def _settle(self) -> None:
        """With living, quick frontends everything must come to its end, and then the engine drains."""
        for owner in self.owners:
            owner.draining = owner.alive
        for _ in range(4):  # all that is submitted is read
            self._step(LEASE_MS + 1, True)
        self.harness.region.store_control("drain", 1)
        for _ in range(2000):
            self._step(1, True)
            if self.harness.engine_state == EngineState.DRAINED:
                break
        for owner in self.owners:
            self._live(owner)
            assert not owner.alive or owner.deliveries.live() == []
        assert self.harness.engine_state == EngineState.DRAINED, "the scheduler does not come to its end"


TestScheduler = SchedulerMachine.TestCase


def test_who_takes_a_slot_late_was_not_passed_by_those_before() -> None:
    """The first pair has its share of the slots until the second one has its own too; then blocks are missing."""
    machine = SchedulerMachine()
    machine.boot(
        policy="fcfs",
        prefix_caching=False,
        num_blocks=6,
        max_num_seqs=2,
        budget=13,
        segments=0,
        target_ms=0,
        overtake_share=0,
    )
    machine._submit(0, [0], SamplingParams(max_tokens=9, best_effort=True), frozenset(), 0, False)
    machine._step(1, False)
    for i, prompt, max_tokens in ((0, [0] * 33, 1), (1, [0, 1, 0], 1), (1, [0] * 9, 9)):
        machine._submit(i, prompt, SamplingParams(max_tokens=max_tokens), frozenset(), 0, False)
    for _ in range(3):
        machine._step(1, True)
    sequences = machine.harness.sequences
    assert sequences["status"][TAGS + 1] == RUNNING
    assert sequences["slot"][1] < machine.judge.rules.num_slots
    machine.teardown()
