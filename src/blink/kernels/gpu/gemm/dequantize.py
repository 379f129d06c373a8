# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportMissingParameterType=false
"""FP8 numbers as 16 bits, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

# Four e4m3 numbers in $2; two bfloat16 in $0, two in $1. Sign, exponent and mantissa go to their places in a bfloat16,
# whose exponent counts from 127 instead of 7: a number that is 2^120 times too small, below the normal ones too. By
# Triton's own conversion a step of 32 rows of Qwen3-30B-A3B takes 11 % longer. Plain GEMMs of two bfloat16 are not
# known before Hopper.
_ASSEMBLY = tl.constexpr("""
{ .reg .b32 p, q, s, t, f, z;
mov.b32 f, 0x7b807b80;
mov.b32 z, 0x80008000;
prmt.b32 p, $2, 0, 0x1404;
prmt.b32 q, $2, 0, 0x3424;
shr.u32 s, p, 4;
shr.u32 t, q, 4;
and.b32 s, s, 0x07f007f0;
and.b32 t, t, 0x07f007f0;
lop3.b32 s, p, 0x80008000, s, 0xea;
lop3.b32 t, q, 0x80008000, t, 0xea;
fma.rn.bf16x2 $0, s, f, z;
fma.rn.bf16x2 $1, t, f, z; }
""")


@triton.jit
def dequantize_fp8(values, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Return finite e4m3 numbers in another type, of which FAST requires that it be bfloat16."""
    if FAST:
        codes = values.to(tl.int8, bitcast=True)
        return tl.inline_asm_elementwise(_ASSEMBLY, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return values.to(DTYPE)
