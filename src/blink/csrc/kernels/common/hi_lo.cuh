// SPDX-License-Identifier: Apache-2.0
// Activations as FP8 twice over: each number is the sum of two e5m2, the second what the first leaves, scaled up. Who
// writes activations writes their hi/lo FP8, [kHiLo, rows, columns] in the order of the weights that are to be
// multiplied with them; GEMMs multiply them as they are.
//
// That is six bits of what lies between 2^-12 and 2^16.8, 0.2 % off on average, where e4m3's weights are 2.5 % off;
// what is smaller is off by up to 2^-19. What is larger becomes the largest at 2^17.8, what is not finite NaN.
#pragma once

#include "kernels/common/ptx.cuh"
#include "kernels/formats.h"

namespace blink {

constexpr int kHiLo = 2;
constexpr float kHiLoDivisor = 4;    // of both: activations before a norm's rate may be large
constexpr float kSecondFactor = 16;  // what three bits leave is 2^-3 of it or less: small ones gain, huge ones lose

// Two bf16 as two numbers of each half.
__device__ inline void split_pair(unsigned pair, unsigned short (&hi_lo)[kHiLo]) {
  float values[2] = {low_float(pair) * (1 / kHiLoDivisor), high_float(pair) * (1 / kHiLoDivisor)};
  const float infinite[2] = {values[0] - values[0], values[1] - values[1]};  // 0, or NaN
#pragma unroll
  for (int i = 0; i < kHiLo; i++) {
    hi_lo[i] = to_e5m2_pair(values[0], values[1]);
#pragma unroll
    for (int j = 0; j < 2; j++)
      values[j] = (values[j] - from_e5m2(hi_lo[i] >> 8 * j & 0xff)) * kSecondFactor + infinite[j];
  }
}

// Add up the GEMMs of a number's hi and lo.
__device__ inline float join_hi_lo(float first, float second) { return first + second * (1 / kSecondFactor); }

// Where a column lies in a row. For weights of 4 bits each 32 columns lie as the operand of a GEMM does that is made
// of a word's even numbers, then of its odd ones.
template <FormatId kOrder>
__device__ inline int packed_place(int column) {
  if constexpr (kOrder == FormatId::kInt4)
    return column / 32 * 32 + column / 8 % 2 * 16 + column % 8 / 2 * 4 + column % 2 * 2 + column / 16 % 2;
  return column / 128 * 128 + column % 8 / 2 * 32 + column % 128 / 16 * 4 + column / 8 % 2 * 2 + column % 2;
}

// Write two numbers' hi and lo halves to a place in memory; size: bytes of a half.
__device__ inline void write_hi_lo(void* hi_lo, long size, long place, unsigned pair) {
  unsigned short numbers[kHiLo];
  split_pair(pair, numbers);
  char* to = static_cast<char*>(hi_lo) + place;
#pragma unroll
  for (int i = 0; i < kHiLo; i++) *reinterpret_cast<unsigned short*>(to + i * size) = numbers[i];
}

// Write two columns, the first of them even, of a row that begins at a place.
template <FormatId kOrder>
__device__ inline void write_columns(void* hi_lo, long size, long row, int column, unsigned pair) {
  const long place = row + packed_place<kOrder>(column);
  if constexpr (kOrder == FormatId::kFp8) {
    write_hi_lo(hi_lo, size, place, pair);
  } else {
    unsigned short numbers[kHiLo];
    split_pair(pair, numbers);
    char* to = static_cast<char*>(hi_lo) + place;
#pragma unroll
    for (int i = 0; i < kHiLo; i++)
      to[i * size] = static_cast<char>(numbers[i]), to[i * size + 2] = static_cast<char>(numbers[i] >> 8);
  }
}

}  // namespace blink
