# SPDX-License-Identifier: Apache-2.0
"""The CPU build under hostile entries by the hundred thousand: the same siege as tests/gpu/test_hostile_sqes.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from blink.engine.state import HostState
from blink.region.layout import BATCH_HEADER, CONSTANTS, SLOT_PARAMS, STEP_OUTPUT, StepKind, StepResult, new_struct
from blink.region.native import lib
from siege import MAX_MODEL_LEN, VOCAB_BYTES, VOCAB_SIZE, besiege, make_region, next_token, place_weights

_PASSES = 256


class HostMachine:
    """A scheduler that is stepped by hand."""

    def __init__(self) -> None:
        self.region = make_region()
        self._state = HostState(self.region)
        self._batch = self._state.array("whole.header", BATCH_HEADER)
        self._output = self._state.array("whole.output", STEP_OUTPUT)
        self._tokens = self._state.array("tokens", "i4").reshape(-1, MAX_MODEL_LEN)
        names = ("row_slots", "context_lens", "sampled_tokens")
        self._slots, self._lens, self._sampled = (self._state.array(StepKind.WHOLE.array(name), "i4") for name in names)
        self._weights = place_weights(MAX_MODEL_LEN)
        self._fill_vocabulary()
        self.num_walks = self.num_dead_ends = 0

    def _fill_vocabulary(self) -> None:
        """Let tokens be one to seven bytes of JSON, or any."""
        chance = np.random.default_rng(8)
        lengths = chance.integers(1, 8, VOCAB_SIZE)
        starts = np.concatenate([[0], lengths.cumsum()])
        starts = np.minimum(starts, VOCAB_BYTES)
        self._state.array("token_starts", "u4")[:] = starts
        text = chance.choice(np.frombuffer(b'[{"a":yesno,}] ', np.uint8), VOCAB_BYTES)
        is_any = chance.random(VOCAB_BYTES) < 0.1
        self._state.array("token_text", "u1")[:] = np.where(is_any, chance.integers(0, 256, VOCAB_BYTES), text)

    def advance(self) -> None:
        for _ in range(_PASSES):
            if lib.blink_step(self._state.address, time.monotonic_ns()) == StepResult.LAUNCHED:
                self._compute()

    def check(self) -> None:
        broken = lib.blink_check_integrity(self._state.address)
        assert broken is None, broken.decode()

    def _compute(self) -> None:
        rows = int(self._batch[0]["num_rows"])
        lens = self._lens[:rows].astype(np.int64)
        is_read = np.arange(MAX_MODEL_LEN) < lens[:, None]
        totals = (self._tokens[self._slots[:rows]] * self._weights * is_read).sum(1)
        self._sampled[:rows] = next_token(totals, lens)
        self._constrain(rows)
        self._output[0]["done_step"] = self._batch[0]["step"]

    def _constrain(self, rows: int) -> None:
        """Walk through the automata of constrained rows, whatever they are, and sample what they allow."""
        params = self._state.array("params", SLOT_PARAMS)
        automata = self._state.array("automata", "u1").reshape(-1, CONSTANTS["max_automaton_bytes"])
        places = self._state.array("automaton_places", "u4").reshape(len(params), -1)
        starts, text, stops = (self._state.array(name, "u1") for name in ("token_starts", "token_text", "stop_tokens"))
        lists = self._state.array("token_bitmasks", "u4").reshape(len(params), CONSTANTS["lists_of_slot"], -1)
        for row, slot in enumerate(self._slots[:rows].tolist()):
            index = int(params[slot]["automaton"])
            if not index:
                continue
            context = int(self._lens[row])
            entry = new_struct(
                "ConstrainedRow",
                automaton=automata[index - 1].ctypes.data,
                places=places[slot].ctypes.data,
                lists=lists[slot].ctypes.data,
                num_lists=lists.shape[1],
                token_starts=starts.ctypes.data,
                token_text=text.ctypes.data,
                stop_tokens=stops.ctypes.data,
                vocab_size=VOCAB_SIZE,
                num_generated=max(context - int(params[slot]["num_prompt_tokens"]), 0),
                last_token=int(self._tokens[slot, context - 1]),
            )
            number = lib.blink_list_allowed(entry.ctypes.data)
            allowed = lists[slot, number - 1] if number else np.zeros(1, np.uint32)
            listed = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
            self.num_walks += 1
            self.num_dead_ends += not len(listed)
            nothing = CONSTANTS["grammar_done" if entry["may_end"] else "invalid_logits"]
            self._sampled[row] = listed[self._sampled[row] % len(listed)] if len(listed) else nothing


@contextmanager
def host_machine() -> Iterator[HostMachine]:
    machine = HostMachine()
    try:
        yield machine
    finally:
        machine.region.remove()
        machine.region.close()


def check_counts(counts: dict[str, int], num_entries: int) -> None:
    """The run is worthless unless it went through what it is for."""
    assert counts["sent"] >= num_entries and counts["bad"] > num_entries / 5
    assert counts["rejected"] > num_entries / 2 and counts["started"] > num_entries / 1000
    assert counts["answered"] > num_entries / 10_000


def test_hostile_entries_of_several_frontends_harm_nobody() -> None:
    with host_machine() as machine:
        counts = besiege(machine, 600_000)
    check_counts(counts, 600_000)
    assert counts["automata"] > 500 and machine.num_walks > 3000 and machine.num_dead_ends > 200
    assert counts["losses"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_million_hostile_entries_of_several_frontends_harm_nobody() -> None:
    with host_machine() as machine:
        counts = besiege(machine, 10_000_000)
    check_counts(counts, 10_000_000)
    assert machine.num_walks > 60_000
