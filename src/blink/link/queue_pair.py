# SPDX-License-Identifier: Apache-2.0
"""The frontend's end of a queue pair: submit and cancel sequences, drain completions. Not thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from blink.errors import OverloadedError
from blink.grammar.automaton import Automaton
from blink.link.base import Link
from blink.link.held_automata import HeldAutomata
from blink.link.variant import BASE_MODEL, ModelVariant
from blink.region.arena import Arena
from blink.region.layout import COMPLETION, CONSTANTS, SQE, CqeKind, Opcode, StructPacker, flat_fields
from blink.region.native import lib

_INLINE_STOPS = CONSTANTS["inline_stop_tokens"]
_ENTRY = StructPacker(SQE)
_UNSET = dict.fromkeys(flat_fields(SQE), 0)
_SUBMIT = int(Opcode.SUBMIT)
_DRAIN_BATCH = 4096
NO_HASH_ROOT = bytes(CONSTANTS["block_hash_bytes"])  # of a sequence whose answer is not cached


class KvOrigin(NamedTuple):
    """What a sequence's keys and values come from besides its tokens: only those of one origin are shared."""

    hash_root: bytes = NO_HASH_ROOT  # of the chain of block hashes
    variant: ModelVariant = BASE_MODEL


NO_ORIGIN = KvOrigin()


@dataclass(slots=True)
class _Live:
    """A sequence that the scheduler has not ended; its arena span until that is consumed."""

    sequence: int
    offset: int
    num_bytes: int
    automaton: Automaton | None


class Submission(NamedTuple):
    """What one sequence needs besides its sampling parameters."""

    prompt: np.ndarray[Any, Any]  # int32 [num_prompt_tokens]
    stop_tokens: Sequence[int]
    seed: int
    block_hashes: bytes  # 16 for each full block of the prompt
    flow: int = 0  # whose request this is: flows of one priority get equal shares of the engine
    origin: KvOrigin = NO_ORIGIN
    automaton: Automaton | None = None  # what its text may look like
    prediction: Sequence[int] | np.ndarray[Any, Any] = ()  # tokens that its answer may have much of


class Parameters(Protocol):
    """How the tokens of one sequence are chosen."""

    @property
    def biases(self) -> Sequence[tuple[int, float]]: ...

    def native_values(self, seed: int) -> Mapping[str, float]:
        """Return a value for each field of csrc's Sampling and for those of its Sqe that the scheduler alone reads."""
        ...


class QueuePair:
    """Own one attached queue pair through a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._at = link.addresses
        geometry = link.geometry
        self._sq_entries = int(geometry["sq_entries"])
        self._arena = Arena(int(geometry["arena_bytes"]))
        self._automata = HeldAutomata(self._arena, self._write_arena)
        self._free_tags = list(range(int(geometry["sequences_per_queue_pair"]) - 1, -1, -1))
        self._generations = [0] * len(self._free_tags)
        self._live: dict[int, _Live] = {}  # by tag
        self._unsent_cancels: list[int] = []
        self._completions = np.zeros(_DRAIN_BATCH, COMPLETION)
        self._completions_at: int = self._completions.ctypes.data
        self._lease = 0
        self.generation = 0
        self._sq_tail = self._sq_head = self.head = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def arena_used_bytes(self) -> int:
        """Arena bytes whose payload the scheduler has not consumed."""
        return self._arena.size - self._arena.free_bytes - self._automata.idle_bytes

    def request_attach(self) -> None:
        """Ask the scheduler for the queue pair, as a new owner."""
        load = self._link.load_word
        self.generation = max(load(self._at.attach), load(self._at.attached)) % 0xFFFFFFFF + 1
        self._lease = load(self._at.lease)
        self.renew_lease()
        self._link.store_word(self._at.attach, self.generation)

    def is_attached(self) -> bool:
        """Say whether the scheduler counts this owner as the queue pair's."""
        return self._link.load_word(self._at.attached) == self.generation

    def start(self) -> None:
        """Take the positions that the scheduler published with the attachment."""
        self._sq_tail = self._sq_head = self._link.load_word(self._at.sq_head)
        self.head = self._link.load_word(self._at.cq_tail)
        self._link.store_word(self._at.sq_tail, self._sq_tail)
        self._link.store_word(self._at.cq_head, self.head)

    def renew_lease(self) -> None:
        """Show the scheduler that this frontend lives; call it well within the lease timeout."""
        self._lease = self._lease + 1 & 0xFFFFFFFF
        self._link.store_word(self._at.lease, self._lease)

    def keep_lease(self, grace: float) -> None:
        """Renew the lease now and, also while the interpreter is busy, for `grace` seconds from now on."""
        if not grace:
            self.renew_lease()
            return
        self._link.keep(self._at.lease, self._lease, grace)

    def submit(self, submission: Submission, params: Parameters) -> int:
        """Queue one sequence and return its id.

        Raises:
            OverloadedError: no tag, no arena space or no room in the submission queue; nothing was queued.
        """
        if not self._free_tags:
            raise OverloadedError("the server's queue is full: too many requests are waiting; retry later")
        if self._sq_room() == 0:
            raise OverloadedError("the engine does not keep up with new requests; retry later")
        payload, offsets = _arena_payload(submission, params)
        automaton = submission.automaton
        automaton_at = self._automata.hold(automaton) if automaton is not None else 0
        offset = None if automaton_at is None else self._automata.allocate(len(payload))
        if automaton_at is None or offset is None:
            if automaton is not None and automaton_at is not None:
                self._automata.release(automaton)
            raise OverloadedError("the server's prompt memory is full; retry later")
        self._write_arena(offset, payload)
        tag = self._free_tags.pop()
        self._generations[tag] = self._generations[tag] + 1 & 0xFFFFFFFF
        sequence = self._generations[tag] << 32 | tag
        self._live[tag] = _Live(sequence, offset, len(payload), automaton)
        self._push(_submit_entry(sequence, submission, params, offset, [*offsets, automaton_at - offset]))
        return sequence

    def cancel(self, sequence: int) -> None:
        """Ask the scheduler to end a sequence; unknown and ended ones are ignored."""
        live = self._live.get(sequence & 0xFFFFFFFF)
        if live is not None and live.sequence == sequence:
            self._unsent_cancels.append(sequence)
            self.flush_cancels()

    def flush_cancels(self) -> None:
        """Send the cancellations that found the submission queue full."""
        while self._unsent_cancels and self._sq_room() > 0:
            entry = np.zeros((), SQE)
            entry["opcode"] = Opcode.CANCEL
            entry["sequence"] = self._unsent_cancels.pop()
            self._push(entry.tobytes())

    def order(self, opcode: Opcode, **fields: int) -> None:
        """Queue an entry about the whole engine, with more of its fields.

        Raises:
            OverloadedError: no room in the submission queue; nothing was queued.
        """
        if self._sq_room() == 0:
            raise OverloadedError("the engine does not keep up with new requests; retry later")
        entry = np.zeros((), SQE)
        entry["opcode"] = opcode
        for name, value in fields.items():
            entry[name] = value
        self._push(entry.tobytes())

    def drain(self) -> np.ndarray[Any, Any]:
        """Return the completions that have arrived (dtype layout.COMPLETION; a view that the next call overwrites)."""
        count = self._link.drain(self.head, self._completions_at, _DRAIN_BATCH)
        completions = self._completions[:count]
        if count == 0:
            return completions
        self.head = self.head + count & 0xFFFFFFFF
        self._link.store_word(self._at.cq_head, self.head)
        # Nearly all are tokens that end nothing; only the others free what a sequence holds.
        unknown, i = [], lib.blink_cq_find_rare(self._completions_at, 0, count)
        while i < count:
            if not self._settle(completions[i]):
                unknown.append(i)
            i = lib.blink_cq_find_rare(self._completions_at, i + 1, count)
        self.flush_cancels()
        return np.delete(completions, unknown) if unknown else completions

    def _settle(self, completion: Any) -> bool:
        """Release what a completion frees; False if it speaks of a sequence that has ended (a late cancellation)."""
        sequence, kind = int(completion["sequence"]), int(completion["kind"])
        live = self._live.get(sequence & 0xFFFFFFFF)
        if live is None or live.sequence != sequence:
            return False
        ended = completion["finish_reason"] != 0
        if live.num_bytes and (ended or kind == CqeKind.ADMITTED):
            self._arena.free(live.offset, live.num_bytes)
            live.num_bytes = 0
            if live.automaton is not None:
                self._automata.release(live.automaton)
        if ended:
            del self._live[sequence & 0xFFFFFFFF]
            self._free_tags.append(sequence & 0xFFFFFFFF)
        return True

    def _sq_room(self) -> int:
        """Return the free entries, as last known: the scheduler's word is read only when none seems left."""
        room = self._sq_entries - (self._sq_tail - self._sq_head & 0xFFFFFFFF)
        if room == 0:
            self._sq_head = self._link.load_word(self._at.sq_head)
            room = self._sq_entries - (self._sq_tail - self._sq_head & 0xFFFFFFFF)
        return room

    def _write_arena(self, offset: int, data: bytes) -> None:
        self._link.write(self._at.arena + offset, data)

    def _push(self, entry: bytes) -> None:
        at = self._at.sq + self._sq_tail % self._sq_entries * SQE.itemsize
        self._link.write(at, entry)
        self._sq_tail = self._sq_tail + 1 & 0xFFFFFFFF
        self._link.store_word(self._at.sq_tail, self._sq_tail)


def _arena_payload(submission: Submission, params: Parameters) -> tuple[bytes, list[int]]:
    """Return the arena's bytes of a sequence and where prompt, hashes, stop tokens, biases and prediction start."""
    prompt = np.ascontiguousarray(submission.prompt, np.int32).tobytes()
    parts = [prompt, submission.block_hashes, _words(submission.stop_tokens[_INLINE_STOPS:]), _biases(params)]
    parts.append(_words(submission.prediction))
    offsets = [0, *accumulate(map(len, parts[:-1]))]
    return b"".join(parts), offsets


def _words(tokens: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes() if len(tokens) else b""


def _biases(params: Parameters) -> bytes:
    biases = params.biases
    if not biases:
        return b""
    values = np.fromiter((bias for _, bias in biases), np.float32, len(biases))
    return _words([token for token, _ in biases]) + values.tobytes()


def _submit_entry(sequence: int, submission: Submission, params: Parameters, base: int, offsets: list[int]) -> bytes:
    prompt, hashes, stops, biases, prediction, automaton = (base + offset for offset in offsets)
    values: dict[str, Any] = {
        **_UNSET,
        **params.native_values(submission.seed),
        "opcode": _SUBMIT,
        "sequence": sequence,
        "flow": submission.flow & 0xFFFFFFFF,
        "hash_root": submission.origin.hash_root,
        "prompt_offset": prompt,
        "num_prompt_tokens": len(submission.prompt),
        "hashes_offset": hashes,
        "num_hashes": len(submission.block_hashes) // CONSTANTS["block_hash_bytes"],
        "more_stop_offset": stops,
        "num_stop_tokens": len(submission.stop_tokens),
        "stop_tokens": _words(submission.stop_tokens[:_INLINE_STOPS]),
        "bias_offset": biases,
        "num_biases": len(params.biases),
        "prediction_offset": prediction,
        "num_prediction_tokens": len(submission.prediction),
        "automaton_offset": automaton,
        "automaton_hash": b"",
        **submission.origin.variant.fields,
    }
    if submission.automaton is not None:
        values["automaton_bytes"] = len(submission.automaton.data)
        values["automaton_hash"] = submission.automaton.name
    return _ENTRY.pack(values)
