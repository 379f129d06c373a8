// SPDX-License-Identifier: Apache-2.0
// Weights of 8 and 4 bits: how they lie in memory, and how registers of bf16 are made of them.
#pragma once

#include "ptx.cuh"

namespace blink {

// kFp8: e4m3; kInt4: whole numbers from 0 to 15, less a zero point.
enum class Format { kFp8, kInt4 };

// A row is cut into units of 128 bytes. Of each, lane q of the four that share a row in a matrix instruction has the 32
// bytes from q * 32 on: for each step s of the instruction, 16 k, those at 16 * s + 2 * q, the next, and 8 further.
template <Format kFormat>
constexpr int kUnit = kFormat == Format::kFp8 ? 128 : 256;  // k
constexpr int kUnitBytes = 128, kGroup = 128;               // k that share a scale and a zero point

// A group's word. kFp8: the scale, a float. kInt4: the scale as half, above it -(128 + zero point) as bf16.
template <Format kFormat>
__device__ inline float group_scale(unsigned word) {
  if constexpr (kFormat == Format::kFp8) return __uint_as_float(word);
  float scale;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(scale) : "r"(word));
  return scale;
}

__device__ inline unsigned fma_pairs(unsigned a, unsigned b, unsigned c) {
  unsigned sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The weights of a word: two registers for each step, k 2 * q and the next, and these 8 further.
template <Format kFormat>
constexpr int kWordSteps = kFormat == Format::kFp8 ? 1 : 2;

template <Format kFormat>
__device__ inline void unpack(unsigned word, unsigned group, unsigned (&pairs)[kWordSteps<kFormat>][2]) {
  if constexpr (kFormat == Format::kFp8) {
    // Sign, exponent and mantissa at bf16's places give the value times 2^-120, as the exponents' biases differ.
    const unsigned low = word << 8;
    const unsigned first = (low & 0x80008000u) | ((low >> 4) & 0x07f007f0u);
    const unsigned second = (word & 0x80008000u) | ((word >> 4) & 0x07f007f0u);
    pairs[0][0] = fma_pairs(first, 0x7b807b80u, 0x80008000u);
    pairs[0][1] = fma_pairs(second, 0x7b807b80u, 0x80008000u);
  } else {
    const unsigned zero = __byte_perm(group, 0, 0x3232);
#pragma unroll
    for (int i = 0; i < 4; i++)  // as the mantissa of 128
      pairs[i / 2][i % 2] = fma_pairs((word >> 4 * i & 0x000f000fu) | 0x43004300u, 0x3f803f80u, zero);
  }
}

}  // namespace blink
