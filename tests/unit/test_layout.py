# SPDX-License-Identifier: Apache-2.0
"""The shared structs: what Python derives is what the native library uses."""

from __future__ import annotations

import itertools
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blink
from blink.config import EngineConfig
from blink.engine.geometry import build_geometry, graph_sizes
from blink.errors import ConfigError
from blink.kernels.batch import Header, Param
from blink.region import layout
from blink.region.native import lib

CSRC = Path(blink.__file__).parent / "csrc"
GOLDEN_DIGEST = 0x9CFE4948ADCD5732


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
    writers = {
        "engine": ("drain", "stop", "energy_mj", "token_energy_uj", "step_tokens"),
        "scheduler": ("heartbeat", "state", "error_code", "statistics"),
    }
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


def test_fields_are_read_out_of_completions_that_follow_each_other() -> None:
    entries = np.zeros(3, layout.COMPLETION)
    entries["sequence"], entries["token"], entries["finish_reason"] = [1, 2**40, 3], [-1, 7, 0], [0, 2, 0]
    reader = layout.StructReader(layout.COMPLETION, ("sequence", "token", "finish_reason"))
    assert [*reader.read(entries)] == [(1, -1, 0), (2**40, 7, 2), (3, 0, 0)]
    assert [*reader.read(entries[1:2])] == [(2**40, 7, 2)] and [*reader.read(entries[:0])] == []


def test_what_is_more_than_a_token_is_found_among_completions() -> None:
    entries = np.zeros(6, layout.COMPLETION)
    entries["kind"], entries["phase"] = layout.CqeKind.TOKEN, [0, 1, 0, 1, 0, 1]
    entries["kind"][1], entries["finish_reason"][4] = layout.CqeKind.ADMITTED, layout.FinishReason.LENGTH
    find = lib.blink_cq_find_rare
    assert [find(entries.ctypes.data, start, 6) for start in range(7)] == [1, 1, 4, 4, 4, 6, 6]
    assert find(entries.ctypes.data, 2, 4) == 4, "behind the count nothing is looked at"


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


def enums_in_the_sources() -> dict[str, dict[str, int]]:
    """Read every enumeration of the region from the text of its header, without the library."""
    text = re.sub(r"//.*", "", (CSRC / "region" / "codes.h").read_text())
    return {
        name: {member: int(value) for member, value in re.findall(r"k(\w+) = (\d+)", body)}
        for name, body in re.findall(r"enum class (\w+) : \w+ \{(.*?)\}", text, re.DOTALL)
    }


@pytest.mark.parametrize("name", enums_in_the_sources())
def test_an_enumeration_has_the_members_of_its_native_one(name: str) -> None:
    here: type[IntEnum] = getattr(layout, name)
    native = enums_in_the_sources()[name]
    assert native and [member.value for member in here] == list(native.values())
    assert [member.name.replace("_", "").lower() for member in here] == [member.lower() for member in native]


def test_a_member_that_no_native_enumeration_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="FLYING"):
        _ = layout.EngineState.FLYING
    with pytest.raises(ValueError, match="99"):
        layout.RejectCode(99)


def fields_in_the_sources() -> dict[str, list[str]]:
    """Read the fields of every struct that describes itself from its header, without the library."""
    found: dict[str, list[str]] = {}
    arguments = ("kernels/args.h", "kernels/comm_args.h", "automaton/machine.h", "cpu/constrain.h", "cpu/json_weight.h")
    scheduler = (f"scheduler/{name}.h" for name in ("row", "step_buffers", "graph_cost", "state", "failure"))
    region = (f"region/{name}.h" for name in ("trace", "adapter_words", "completion", "layout"))
    for header in (*region, *scheduler, "device/program.h", *arguments):
        text = (CSRC / header).read_text()
        structs = re.findall(r"^struct (?:alignas\(\d+\) )?(\w+) \{(.*?)^\};", text, re.DOTALL | re.MULTILINE)
        for name, body in structs:
            if "FIELDS_OF" in body:
                assert f"FIELDS_OF({name});" in body
                found[name] = re.findall(r"(?:FIELD|FIELD_ARRAY|STATE_ARRAYS?)\([\w* ]+, (\w+)[,)]", body)
                plain = re.findall(r"^  [\w*]+ (\w+)(?:\[\d+\])?;", body, re.MULTILINE)
                assert set(plain) <= {"reserved"}, f"{name} hides words from Python"
    return found


@pytest.mark.parametrize("name", sorted(fields_in_the_sources()))
def test_a_struct_has_the_fields_of_its_native_one(name: str) -> None:
    assert layout.struct_dtype(name).names == tuple(fields_in_the_sources()[name])


def test_columns_and_header_words_are_where_the_scheduler_writes_them() -> None:
    params = np.arange(layout.SLOT_PARAMS.itemsize // 4, dtype=np.uint32)
    slot = params.view(layout.SLOT_PARAMS)[0]
    for param in Param:
        struct = slot if param.name.lower() in (layout.SLOT_PARAMS.names or ()) else slot["sampling"]
        assert struct[param.name.lower()].view(np.uint32) == param
    header = np.arange(8, dtype=np.uint32).view(layout.BATCH_HEADER)[0]
    assert [int(header[word.name.lower()]) for word in Header if word != Header.STEP] == [0, 1, 2, 3, 6]
    assert [int(param) for param in Param][:6] == list(range(6)), "the floats come first"


def test_a_place_names_file_and_line() -> None:
    assert layout.place_name(0 << 16 | 12) == "compose.h:12"
    assert layout.place_name(5 << 16 | 345) == "scheduler_kernel.cu:345"


def test_a_geometry_keeps_what_it_is_built_from() -> None:
    config = EngineConfig(max_num_seqs=100, max_num_batched_tokens=3000, num_queue_pairs=3, lease_timeout=1.5)
    geometry = build_geometry(config, max_model_len=1000, vocab_size=77, num_blocks=500)
    assert geometry["max_blocks"] == 63 and geometry["lease_timeout_ns"] == 1_500_000_000
    graphs, num_decode = graph_sizes(geometry), int(geometry["num_decode_graphs"])
    scoring = int(geometry["first_scoring_graph"])
    decode, mixed = graphs[:num_decode], graphs[num_decode:scoring]
    assert graphs[scoring:] == mixed
    for part, limit in ((decode, 100), (mixed, 3000)):
        assert part == sorted(set(part)) and part[-1][0] == limit
    assert all(tokens == rows for tokens, rows in decode)
    assert all(rows == min(tokens, 100) for tokens, rows in mixed)
    for ring in ("sq_entries", "cq_entries", "hash_entries", "lru_entries"):
        assert int(geometry[ring]).bit_count() == 1
    assert geometry["cq_entries"] >= 21 * 100, "one step of logprobs must fit"


def test_more_graphs_than_the_table_holds_are_refused() -> None:
    config = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=1 << 17)
    with pytest.raises(ConfigError, match="graphs are too many: lower --max-num-seqs"):
        build_geometry(config, max_model_len=1000, vocab_size=77, num_blocks=500)


def test_packed_structs_are_those_that_numpy_writes() -> None:
    flat = layout.flat_fields(layout.SQE)
    values: dict[str, Any] = {
        name: (7 + i) % 100 if kind.kind != "f" else 0.25 * i for i, (name, (kind, _)) in enumerate(flat.items())
    }
    values["automaton_hash"] = bytes(range(16))
    values["stop_tokens"] = np.array([5, -1, 2**31 - 1], np.int32).tobytes()
    values["hash_root"] = bytes(range(16))
    values |= {"priority": -3, "sequence": 2**63 + 1, "seed_low": 2**32 - 1}
    entry = np.zeros((), layout.SQE)
    for name in layout.SQE.names or ():
        if name == "stop_tokens":
            entry[name][:3] = [5, -1, 2**31 - 1]
        elif name in ("hash_root", "automaton_hash"):
            entry[name] = range(16)
        elif name == "sampling":
            entry[name] = tuple(values[part] for part in layout.SAMPLING.names or ())
        else:
            entry[name] = values[name]
    assert layout.StructPacker(layout.SQE).pack(values) == entry.tobytes()
