# SPDX-License-Identifier: Apache-2.0
"""A frontend that maps its engine's region and writes what no frontend would, thousands of entries at a time.

As a program (hostile_frontend.py REGION SEED TAGS) it does so for as long as it runs, from a queue pair of its own.
With a fourth word, "sound", it sends the sound ones of its entries alone, and keeps as many requests open.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from automata import sound_automata
from blink.region.layout import AUTOMATON_HEADER, COMPLETION, CONSTANTS, CQE, SQE, CqeKind, Opcode, RejectCode
from blink.region.memory import QueuePairAddresses, Region, claim_queue_pair, open_region
from blink.region.native import lib

Entries = npt.NDArray[np.void]
_EDGES = np.array(
    [0, 1, 2, 7, 8, 15, 16, 63, 64, 127, 128, 129, 1024, 1025, 0x7FFFFFFF, 1 << 31, 0xFFFFFFFF], np.uint32
)
_BIASES = np.array([100, -100, 0, 1e-45, 100.00001, -1e38, np.inf, -np.inf, np.nan, -np.nan], np.float32)
_USED_WORDS = SQE.fields["tpot_target_us"][1] // 4 + 1  # pyright: ignore[reportOptionalSubscript]
_TAGS = 16  # of its requests, so that most of its sound entries are refused as busy, and a step stays small
_MOST_BIASES = 16
_USED_ARENA = 1 << 16  # bytes of the arena that its sound entries name; it should not attack the machine's memory
_MOST_ENTRIES = 4096  # made at once
_AUTOMATA_AT = 1 << 15  # where in the arena its automata are, one after the other
_AUTOMATA = sound_automata()
_AUTOMATA_PLACES = np.cumsum([_AUTOMATA_AT, *map(len, _AUTOMATA)])[:-1]
_DEPENDS_ON_STATE = [RejectCode.TAG_BUSY, RejectCode.UNKNOWN_SEQUENCE, RejectCode.PROMPT_TOKEN, RejectCode.BIAS_VALUE]
_DEPENDS_ON_STATE += [RejectCode.AUTOMATON]
_STATE_CODES = np.array([int(code) for code in _DEPENDS_ON_STATE])


class HostileFrontend:
    """Own one queue pair of a mapped region and misuse it."""

    def __init__(self, region: Region, index: int, seed: int, num_tags: int = _TAGS) -> None:
        """Prepare; of what it sends, at most `num_tags` sound requests are open at a time."""
        self._region = region
        self._at = QueuePairAddresses(region, index)
        self._geometry = region.geometry
        self._sq_entries = int(region.geometry["sq_entries"])
        self._cq_entries = int(region.geometry["cq_entries"])
        self._sq = region.view(SQE, self._at.sq, self._sq_entries)
        size = min(int(region.geometry["arena_bytes"]), _USED_ARENA)
        self._arena = region.view(np.dtype("u4"), self._at.arena, size // 4)
        self._out = np.zeros(self._cq_entries, CQE)
        self._chance = np.random.default_rng(seed)
        self._num_tags = num_tags
        self._tail = self._head = self._lease = self._generation = 0
        self._is_started = False
        self._deaf = 0  # calls of act() in which it will not read
        self.sent = self.bad = self.refused = self.started = self.losses = 0
        self.spoil_arena()

    def attach(self) -> None:
        """Ask for the queue pair, as a new owner."""
        self._generation = max(self._load(self._at.attach), self._load(self._at.attached)) % 0xFFFFFFFF + 1
        self._is_started = False
        self.renew()
        self._store(self._at.attach, self._generation)

    @property
    def is_attached(self) -> bool:
        return self._load(self._at.attached) == self._generation

    def renew(self) -> None:
        self._lease = self._lease + 1 & 0xFFFFFFFF
        self._store(self._at.lease, self._lease)

    def act(self, *, wild: bool) -> int:
        """Fill the submission queue; `wild`: break the words too, and leave the answers unread. Return the entries."""
        if not self._keep_attached():
            return 0
        chance = self._chance.random()
        if wild and chance < 0.05:
            self._deaf = int(self._chance.integers(1, 30))
        self._deaf = max(0, self._deaf - 1)
        if not self._deaf:
            self.drain()
        if chance < 0.3:
            self.spoil_arena()
        count = self._push(self._make_entries(self._num_free))
        if wild and chance < 0.1:
            self._misbehave()
        return count

    def ask(self) -> int:
        """Submit a sound request for each tag; those of open ones are refused as busy. Return the entries."""
        if not self._keep_attached():
            return 0
        self.drain()
        made = self._make_entries(min(self._num_free, 64))
        sound = made[~are_bad(self._geometry, made) & (made["opcode"] == Opcode.SUBMIT)]
        _, first = np.unique(sound["sequence"] & 0xFFFFFFFF, return_index=True)
        return self._push(sound[first])

    def _keep_attached(self) -> bool:
        self.renew()
        if self.is_attached:
            if not self._is_started:
                self._start()
        elif self._is_started:
            self.losses += 1
            self.attach()
        return self.is_attached

    def drain(self) -> None:
        """Read the answers."""
        queue = self._region.address + self._at.cq
        count = lib.blink_cq_drain(queue, self._cq_entries, self._head, self._out.ctypes.data, len(self._out))
        self._head = self._head + count & 0xFFFFFFFF
        self._store(self._at.cq_head, self._head)
        answers = self._out[:count].view(COMPLETION)
        rejected = answers["kind"] == CqeKind.REJECTED
        self.refused += int((rejected & ~np.isin(answers["token"], _STATE_CODES)).sum())
        self.started += int((answers["kind"] == CqeKind.ADMITTED).sum())

    @property
    def num_untaken(self) -> int:
        """Entries that the scheduler has not read."""
        return self._tail - self._load(self._at.sq_head) & 0xFFFFFFFF

    def spoil_arena(self) -> None:
        """Fill it with tokens mostly, and biases at its start; floats that are no numbers, and anything, between."""
        chance, size = self._chance, len(self._arena)
        words = chance.integers(0, int(self._geometry["vocab_size"]), size, np.uint32)
        words[chance.integers(0, size, size // 500)] = chance.integers(0, 1 << 32, size // 500, np.uint32)
        words[chance.integers(0, size, size // 500)] = 0x7F800000
        values = chance.integers(-100, 100, _MOST_BIASES).astype(np.float32)
        values[chance.integers(0, _MOST_BIASES)] = chance.choice(_BIASES)
        words[_MOST_BIASES : 2 * _MOST_BIASES] = values.view(np.uint32)
        self._arena[:] = words
        self._write_automata()

    def _write_automata(self) -> None:
        """Write automata that are sound, or of which some words or bytes are anything."""
        chance = self._chance
        for place, data in zip(_AUTOMATA_PLACES.tolist(), _AUTOMATA, strict=True):
            if place + len(data) > 4 * len(self._arena):
                return
            words = np.frombuffer(bytearray(data), np.uint32)
            for _ in range(chance.choice([0, 0, 1, 3, 40])):
                drawn = [int(chance.integers(0, 1 << 32)), int(chance.integers(0, 40)), 0xFFFF_8000, 0x8000_8001]
                values = np.array([*_EDGES.tolist(), *drawn], np.uint32)
                words[chance.integers(0, chance.choice([4, len(words)]))] = chance.choice(values)
            self._arena[place // 4 : (place + len(data)) // 4] = words

    def _start(self) -> None:
        self._tail, self._head = self._load(self._at.sq_head), self._load(self._at.cq_tail)
        self._store(self._at.sq_tail, self._tail)
        self._store(self._at.cq_head, self._head)
        self._is_started = True

    @property
    def _num_free(self) -> int:
        return max(0, min(self._sq_entries - self.num_untaken, _MOST_ENTRIES))

    def _push(self, entries: Entries) -> int:
        count = len(entries)
        if count == 0:
            return 0
        self._sq[(self._tail + np.arange(count)) % self._sq_entries] = entries
        self._tail = self._tail + count & 0xFFFFFFFF
        self._store(self._at.sq_tail, self._tail)
        self.sent += count
        self.bad += int(are_bad(self._geometry, entries).sum())
        return count

    def _misbehave(self) -> None:
        """Break the protocol of the frontend's words."""
        place = (self._at.sq_tail, self._at.lease, self._at.cq_head, self._at.cq_head)[self._chance.integers(0, 4)]
        if self._chance.random() < 0.5:  # a jump by less than the queue holds
            self._store(place, self._load(place) + int(self._chance.integers(-64, 64)) & 0xFFFFFFFF)
        else:
            self._store(place, int(self._chance.integers(0, 1 << 32)))

    def _make_entries(self, count: int) -> Entries:
        chance = self._chance
        entries: Any = np.zeros(count, SQE)
        entries["opcode"] = np.where(chance.random(count) < 0.125, Opcode.CANCEL, Opcode.SUBMIT)
        entries["sequence"] = chance.integers(0, 4, count) << 32 | chance.integers(0, self._num_tags, count)
        entries["prompt_offset"] = chance.integers(0, 1024, count) * 4
        entries["num_prompt_tokens"] = chance.integers(1, 60, count)
        hashed = entries["num_prompt_tokens"] // int(self._geometry["block_size"])
        entries["num_hashes"] = np.where(chance.random(count) < 0.5, hashed, 0)
        entries["hashes_offset"] = chance.integers(0, 512, count) * 4
        entries["num_biases"] = np.where(chance.random(count) < 0.25, _MOST_BIASES, 0)
        entries["max_tokens"] = chance.integers(1, 7, count)
        entries["flow"] = chance.integers(0, 1 << 32, count)
        entries["opcode"][entries["flow"] % 64 == 1] = Opcode.RESET_PREFIX_CACHE
        entries["hash_root"] = entries["flow"][:, None] % 2  # of half of them the answer is cached too
        picked = chance.integers(0, len(_AUTOMATA), count)
        is_constrained = chance.random(count) < 0.25
        entries["automaton_offset"] = np.where(is_constrained, _AUTOMATA_PLACES[picked], 0)
        entries["automaton_bytes"] = np.where(is_constrained, np.array([len(data) for data in _AUTOMATA])[picked], 0)
        entries["automaton_hash"][:, 0] = chance.integers(0, 12, count)  # of few names, so that they are taken twice
        sampling = entries["sampling"]
        sampling["top_p"] = sampling["repetition_penalty"] = 1.0
        sampling["num_logprobs"] = chance.integers(-1, 3, count)
        named = (sampling["num_logprobs"] > 0) & (entries["num_biases"] >= 2) & (chance.random(count) < 0.5)
        sampling["named_logprobs"] = np.where(named, sampling["num_logprobs"], 0)
        sampling["num_prompt_logprobs"] = np.where(chance.random(count) < 0.25, chance.integers(0, 4, count), 0)
        words = entries.view(np.uint32).reshape(count, SQE.itemsize // 4)
        for _ in range(2):
            rows = np.flatnonzero(chance.random(count) < 0.3)
            drawn = chance.integers(0, 1 << 32, len(rows), np.uint32)
            values = np.where(chance.random(len(rows)) < 0.6, chance.choice(_EDGES, len(rows)), drawn)
            words[rows, chance.integers(0, _USED_WORDS, len(rows))] = values
        rows = np.flatnonzero(chance.random(count) < 0.125)
        words[rows] = chance.integers(0, 1 << 32, (len(rows), words.shape[1]), np.uint32)
        entries["opcode"][rows[::2]] = Opcode.SUBMIT
        return entries

    def _load(self, offset: int) -> int:
        return lib.blink_load_u32(self._region.address + offset)

    def _store(self, offset: int, value: int) -> None:
        lib.blink_store_u32(self._region.address + offset, value)


def are_bad(geometry: Any, entries: Any) -> npt.NDArray[np.bool_]:
    """Say which entries a scheduler must refuse whatever its state is; from the contract, not from its code."""

    def beyond(values: Any, low: float, high: float) -> Any:
        return ~((values >= low) & (values <= high))  # true of NaN

    def outside(offset: Any, num_bytes: Any) -> Any:
        return (offset % 4 != 0) | (offset.astype(np.uint64) + num_bytes.astype(np.uint64) > geometry["arena_bytes"])

    prompt, stops, biases, hashes = (
        entries[f"num_{name}"].astype(np.uint64) for name in ("prompt_tokens", "stop_tokens", "biases", "hashes")
    )
    sampling = entries["sampling"]
    sizes = (prompt < 1) | (prompt >= geometry["max_model_len"]) | (hashes > prompt // geometry["block_size"])
    sizes |= (stops > CONSTANTS["max_stop_tokens"]) | (biases > CONSTANTS["max_logit_biases"])
    inline = CONSTANTS["inline_stop_tokens"]
    more = np.where(stops > inline, stops - np.minimum(stops, inline), 0)
    places = outside(entries["prompt_offset"], 4 * prompt)
    places |= (more > 0) & outside(entries["more_stop_offset"], 4 * more)
    places |= (biases > 0) & outside(entries["bias_offset"], 8 * biases)
    places |= (hashes > 0) & outside(entries["hashes_offset"], CONSTANTS["block_hash_bytes"] * hashes)
    spans = entries["automaton_bytes"].astype(np.uint64)
    unit, least = CONSTANTS["automaton_unit"], AUTOMATON_HEADER.itemsize + 256
    places |= (spans > 0) & outside(entries["automaton_offset"], spans)
    places |= (spans > 0) & ((spans % unit != 0) | (entries["automaton_offset"] % unit != 0) | (spans < least))
    places |= (spans > 0) & ((spans > CONSTANTS["max_automaton_bytes"]) | (geometry["vocab_bytes"] == 0))
    values = beyond(sampling["temperature"], 0, 100) | beyond(sampling["min_p"], 0, 1)
    for name, high in (("top_p", 1), ("repetition_penalty", 1e6)):
        values |= beyond(sampling[name], 0, high) | (sampling[name] == 0)
    values |= beyond(sampling["presence_penalty"], -2, 2) | beyond(sampling["frequency_penalty"], -2, 2)
    values |= (sampling["top_k"] < -1) | beyond(sampling["num_logprobs"], -1, CONSTANTS["max_logprobs"])
    values |= sampling["num_prompt_logprobs"] > 1 + CONSTANTS["max_logprobs"]
    named = sampling["named_logprobs"]
    values |= (named > 0) & ((named != sampling["num_logprobs"]) | (named > biases))
    target = entries["tpot_target_us"]
    values |= (target > CONSTANTS["max_tpot_target_us"]) & (target != CONSTANTS["no_tpot_target"])
    values |= (entries["max_tokens"] < 1) | (sampling["min_tokens"] > entries["max_tokens"])
    submits = entries["opcode"] == Opcode.SUBMIT
    wrong = ~submits & (entries["opcode"] != Opcode.CANCEL)
    wrong |= (entries["sequence"] & 0xFFFFFFFF) >= geometry["sequences_per_queue_pair"]
    wrong &= entries["opcode"] != Opcode.RESET_PREFIX_CACHE
    return wrong | (submits & (sizes | places | values | (entries["service_class"] > 1)))


def main(name: str, seed: int, num_tags: int, *, is_sound: bool) -> None:
    """Attack an engine without end, or use it, and say every second how much was sent."""
    region = open_region(name)
    index = claim_queue_pair(region)
    assert index is not None, "all queue pairs are taken"
    hostile = HostileFrontend(region, index, seed, num_tags)
    hostile.attach()
    due = time.monotonic() + 1
    while True:
        count = hostile.ask() if is_sound else hostile.act(wild=True)
        if is_sound or not count:
            time.sleep(0.001)
        if time.monotonic() > due:
            due += 1
            print(hostile.sent, hostile.started, hostile.losses, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), is_sound="sound" in sys.argv[4:])
