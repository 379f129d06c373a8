# SPDX-License-Identifier: Apache-2.0
"""The arguments of kernels: every launch gives what args.h and comm_args.h have, and it lies where it always has."""

from __future__ import annotations

import ast
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import blink
from blink.kernels.gpu.arguments import args
from blink.region.layout import own_fields, struct_dtype

PACKAGE = Path(blink.__file__).parent
HEADER = "".join((PACKAGE / "csrc" / "kernels" / name).read_text() for name in ("args.h", "comm_args.h"))
STRUCTS = re.findall(r"^  FIELDS_OF\((\w+)\);", HEADER, re.MULTILINE)

# Offsets, and at the end the size, of the structs that kernels were compiled with when they described themselves.
OFFSETS = {
    "TensorMap": "words 0 end 128",
    "EmbedArgs": "ids 0 embedding 8 norm 16 residual 24 next_x 32 next_square_sums 40 hidden 48 end 56",
    "OutputArgs": (
        "bias 0 out 8 square_sums 16 next_norm 24 next_x 32 next_square_sums 40 scales 48 inverse_rms 56 eps 64 "
        "per_k 68 n 72 rows 76 num_square_sums 80 end 88"
    ),
    "GemmArgs": "weight 0 x 128 output 256 stages 344 num_groups 348 groups 352 end 384",
    "ShrinkArgs": (
        "x 0 down 8 places 16 distinct 24 found 32 begun 40 down_stride 48 turn 56 k 60 width 64 rows 68 end 72"
    ),
    "UpdateArgs": (
        "up 0 parts 8 places 16 distinct 24 found 32 begun 40 up_stride 48 turn 56 rank 60 width 64 tile 68 end 72"
    ),
    "UpdatedGemmArgs": "gemm 0 update 384 end 512",
    "GemvArgs": "weight 0 bias 8 x 16 norm 24 out 32 scales 40 groups 48 eps 56 n 60 end 64",
    "GroupedArgs": (
        "weight 0 x 128 counts 256 pairs 264 scales 272 out 280 experts 288 places 292 n 296 stages 300 end 320"
    ),
    "PermutationArgs": (
        "logits 0 num_tokens 8 x 16 inverse_rms 24 weights 32 pairs 40 counts 48 out 56 rows 64 experts 68 hidden 72 "
        "places 76 end 80"
    ),
    "RoutingArgs": "logits 0 context_lens 8 renormalize 16 end 24",
    "MoeGateArgs": "routing 0 weight 24 x 32 norm 40 out 48 words 56 eps 64 end 72",
    "MoeDownArgs": (
        "routing 0 weight 24 x 32 residual 40 next_norm 48 next_x 56 next_square_sums 64 words 72 n 80 hi_lo 84 end 88"
    ),
    "AttentionArgs": (
        "cells 0 qkv 128 cache 136 values 144 block_tables 152 row_slots 160 context_lens 168 positions 176 kv_slots "
        "184 rotary 192 query_norm 200 key_norm 208 out 216 eps 224 scale 228 key_rate 232 value_rate 236 value_scale "
        "240 table_stride 244 end 256"
    ),
    "SampleArgs": (
        "logits 0 header 8 row_slots 16 context_lens 24 params 32 tokens 40 stop_tokens 48 bias_tokens 56 bias_values "
        "64 allowed 72 lists 80 may_end 88 changes 96 sampled_tokens 104 sampled_logprobs 112 top_tokens 120 "
        "top_logprobs 128 stride 136 vocab_size 140 max_model_len 144 change_words 148 end 152"
    ),
    "PrefillGemmArgs": "weight 0 x 128 words 256 out 264 n 272 rows 276 units 280 end 320",
    "GateUpArgs": "weight 0 x 128 out 256 outputs 264 rows 268 boxes 272 end 320",
    "PromptArgs": (
        "cells 0 query 128 block_tables 136 items 144 counters 152 partials 160 lses 168 out 176 scale 184 "
        "table_stride 188 end 192"
    ),
    "DeltaDecodeArgs": (
        "qkv 0 z 8 b 16 a 24 conv 32 rate 40 dt_bias 48 norm 56 slots 64 positions 72 states 80 inputs 88 out 96 "
        "qkv_stride 104 z_stride 108 b_stride 112 a_stride 116 eps 120 end 128"
    ),
    "InvertArgs": "below 0 factor 8 out 16 matrices 24 end 32",
    "RankArgs": "boxes 0 lines 8 pieces 12 rank 16 size 20 op 24 end 32",
    "AllReduceArgs": "ranks 0 partial 32 norm 40 residual 48 out 56 count 64 width 68 eps 72 end 80",
    "TwoShotArgs": "ranks 0 partial 32 out 40 count 48 end 56",
    "JoinArgs": "ranks 0 part 32 out 40 starts 48 rows 56 end 64",
    "EndStepArgs": "ranks 0 failed 32 end 40",
    "PullArgs": (
        "source 0 to 8 spans 16 row_slots 24 context_lens 32 tables 40 own_tables 48 window_tables 56 "
        "own_window_tables 64 params 72 own_params 80 num_spans 88 max_blocks 92 block_size 96 param_words 100 "
        "param 104 end 112"
    ),
    "ConstrainArgs": (
        "header 0 row_slots 8 context_lens 16 params 24 tokens 32 stop_tokens 40 automata 48 places 56 token_starts "
        "64 token_text 72 bits 80 lists 88 may_end 96 new_places 104 max_model_len 112 vocab_size 116 words 120 "
        "num_lists 124 shared_bytes 128 end 136"
    ),
}


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_lie_where_they_always_have(name: str) -> None:
    layout = struct_dtype(name)
    offsets = [*((field, offset) for field, (_, offset) in own_fields(layout).items()), ("end", layout.itemsize)]
    assert " ".join(f"{field} {offset}" for field, offset in offsets) == OFFSETS[name]


@pytest.mark.parametrize("name", STRUCTS)
def test_descriptions_of_tensors_are_aligned_as_their_copies_want_them(name: str) -> None:
    layout, tensor_map = struct_dtype(name), struct_dtype("TensorMap")
    places = [offset for kind, offset in own_fields(layout).values() if kind == tensor_map]
    assert all(place % 64 == 0 for place in (*places, *([layout.itemsize] if places else [])))


def calls_of_args() -> list[tuple[str, ast.Call]]:
    """List every call of args(), and where it is."""
    found = []
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "args":
                found.append((f"{path.name}:{node.lineno}", node))
    return found


@pytest.mark.parametrize(("place", "call"), calls_of_args(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_launch_gives_every_field_and_no_other(place: str, call: ast.Call) -> None:
    name, given = ast.literal_eval(call.args[0]), [keyword.arg for keyword in call.keywords]
    assert given == list(struct_dtype(name).names or ()), place


def test_every_struct_is_given_to_a_kernel() -> None:
    given = {ast.literal_eval(call.args[0]) for _, call in calls_of_args()}
    assert {"TensorMap", *given} == set(STRUCTS) == set(OFFSETS)


POINTERS = ("ids", "embedding", "norm", "residual", "next_x", "next_square_sums")


def test_arguments_are_packed_by_name() -> None:
    ids, hidden = torch.zeros(4, dtype=torch.int32), 4096
    packed = args("EmbedArgs", hidden=hidden, **(dict.fromkeys(POINTERS) | {"ids": ids, "next_x": ids[1:]}))
    assert struct.unpack("6Qi4x", packed) == (ids.data_ptr(), 0, 0, 0, ids.data_ptr() + 4, 0, hidden)


def test_a_struct_in_a_struct_is_its_bytes() -> None:
    output = bytes(range(struct_dtype("OutputArgs").itemsize))
    weight, x = bytes(128), b"x" * 128
    packed = args("GemmArgs", weight=weight, x=x, output=output, stages=3, num_groups=2, groups=None)
    filled = np.frombuffer(packed, struct_dtype("GemmArgs"))[0]
    assert filled["x"].tobytes() == x and filled["output"].tobytes()[:84] == output[:84]
    assert (filled["stages"], filled["num_groups"], filled["groups"]) == (3, 2, 0)
    with pytest.raises(TypeError, match="127 bytes are given for a struct of 128"):
        args("GemmArgs", weight=weight[1:], x=x, output=output, stages=3, num_groups=2, groups=None)


@pytest.mark.parametrize(
    ("fields", "names"),
    [(POINTERS, "hidden"), ((*POINTERS, "hidden", "size"), "size"), ((*POINTERS[1:], "hide"), "hidden, hide, ids")],
)
def test_a_missing_or_unknown_field_is_an_error(fields: tuple[str, ...], names: str) -> None:
    with pytest.raises(TypeError, match=f"EmbedArgs and the values for it differ in these fields: {names}$"):
        args("EmbedArgs", **dict.fromkeys(fields))


def test_a_value_that_does_not_fit_its_field_is_an_error() -> None:
    with pytest.raises(struct.error):
        args("EmbedArgs", **dict.fromkeys(POINTERS), hidden=1 << 31)
    with pytest.raises(AttributeError):
        args("EmbedArgs", **dict.fromkeys(POINTERS, 0), hidden=1)
