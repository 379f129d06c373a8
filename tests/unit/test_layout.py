# SPDX-License-Identifier: Apache-2.0
"""The shared structs: what Python derives is what the native library uses."""

from __future__ import annotations

import itertools
from enum import IntEnum

import numpy as np
import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.errors import LayoutMismatchError
from blink.region import layout
from blink.region.native import lib

GOLDEN_DIGEST = 0x9A097885D20665BA


def test_the_digest_is_the_recorded_one() -> None:
    """A new layout needs a new digest here; kLayoutVersion changes too when the region's meaning does."""
    assert hex(layout.DIGEST) == hex(GOLDEN_DIGEST)


def test_entries_have_the_sizes_that_their_rings_are_built_on() -> None:
    assert (layout.SQE.itemsize, layout.CQE.itemsize, layout.COMPLETION.itemsize) == (256, 32, 32)
    assert layout.FRONTEND_WORDS.itemsize == layout.SCHEDULER_WORDS.itemsize == 64


@pytest.mark.parametrize("name", ["HEADER", "CONTROL", "GEOMETRY", "SQE", "CQE", "TRACE_ENTRY", "SEQUENCE"])
def test_fields_of_a_struct_do_not_overlap(name: str) -> None:
    dtype: np.dtype = getattr(layout, name)
    assert dtype.fields is not None
    spans = sorted((offset, offset + field.itemsize) for field, offset, *_ in dtype.fields.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= dtype.itemsize


def test_words_of_different_writers_are_on_different_cache_lines() -> None:
    fields = layout.CONTROL.fields
    assert fields is not None
    writers = {"engine": ("drain", "stop"), "scheduler": ("heartbeat", "state", "error_code", "statistics")}
    lines = {writer: {fields[name][1] // 64 for name in names} for writer, names in writers.items()}
    assert not lines["engine"] & lines["scheduler"]


def test_a_completion_splits_the_tag_into_kind_reason_and_rank() -> None:
    entries = np.zeros(4, layout.CQE)
    entries[0]["tag"] = 1 | layout.CqeKind.TOP_LOGPROB << 8 | layout.FinishReason.LENGTH << 16 | 19 << 24
    entries[0]["sequence"], entries[0]["token"], entries[0]["logprob"] = 7 << 32 | 3, -5, -0.5
    out = np.zeros(4, layout.CQE)
    assert lib.blink_cq_drain(entries.ctypes.data, 4, 0, out.ctypes.data, 4) == 1
    completion = out.view(layout.COMPLETION)[0]
    assert completion["kind"] == layout.CqeKind.TOP_LOGPROB and completion["rank"] == 19
    assert completion["finish_reason"] == layout.FinishReason.LENGTH
    assert (completion["sequence"], completion["token"], completion["logprob"]) == (7 << 32 | 3, -5, -0.5)


@pytest.mark.parametrize("head", [0, 3, 4, 7, 2**32 - 4, 2**32 - 1])
def test_a_drain_takes_exactly_the_entries_of_this_lap(head: int) -> None:
    entries = np.zeros(4, layout.CQE)
    for position in range(head - 4, head):  # the lap before, already taken
        entries[position % 4]["tag"] = (position // 4 + 1) & 1 if position >= 0 else 0
    for position in range(head, head + 2):
        entries[position % 4]["tag"] = (position // 4 + 1) & 1
        entries[position % 4]["index"] = position - head
    out = np.zeros(4, layout.CQE)
    assert lib.blink_cq_drain(entries.ctypes.data, 4, head, out.ctypes.data, 4) == 2
    assert out["index"][:2].tolist() == [0, 1]


def test_an_enum_that_differs_from_the_native_one_is_refused() -> None:
    class Opcode(IntEnum):
        SUBMIT = 1
        CANCEL = 3

    with pytest.raises(LayoutMismatchError, match="Opcode"):
        layout._check(Opcode)


def test_a_geometry_keeps_what_it_is_built_from() -> None:
    config = EngineConfig(max_num_seqs=100, max_num_batched_tokens=3000, num_queue_pairs=3, lease_timeout=1.5)
    geometry = build_geometry(config, max_model_len=1000, vocab_size=77, num_blocks=500)
    assert geometry["max_blocks"] == 63 and geometry["lease_timeout_ns"] == 1_500_000_000
    for kind, limit in (("decode", 100), ("mixed", 3000)):
        buckets = geometry[f"{kind}_buckets"][: int(geometry[f"num_{kind}_buckets"])].tolist()
        assert buckets == sorted(set(buckets)) and buckets[-1] == limit
    for ring in ("sq_entries", "cq_entries", "hash_entries", "lru_entries"):
        assert int(geometry[ring]).bit_count() == 1
    assert geometry["cq_entries"] >= 21 * 100, "one step of logprobs must fit"
