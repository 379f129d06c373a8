// SPDX-License-Identifier: Apache-2.0
// Activations as FP8 twice over: each number is the sum of two e5m2, the second what the first leaves, scaled up. Who
// writes activations writes their planes, [kPlanes, rows, columns] in the order of the weights that are to be
// multiplied with them; products multiply them as they are.
//
// That is six bits of what lies between 2^-12 and 2^16.8, 0.2 % off on average, where e4m3's weights are 2.5 % off;
// what is smaller is off by up to 2^-19. What is larger becomes the largest at 2^17.8, what is not finite NaN.
#pragma once

#include "gpu/formats.h"
#include "ptx.cuh"

namespace blink {

constexpr int kPlanes = 2;
constexpr float kPlanesDivisor = 4;  // of both: activations before a norm's rate may be large
constexpr float kSecondFactor = 16;  // what three bits leave is 2^-3 of it or less: small ones gain, huge ones lose

// Two bf16 as two numbers of each plane.
__device__ inline void split_pair(unsigned pair, unsigned short (&planes)[kPlanes]) {
  float values[2] = {low_float(pair) * (1 / kPlanesDivisor), high_float(pair) * (1 / kPlanesDivisor)};
  const float infinite[2] = {values[0] - values[0], values[1] - values[1]};  // 0, or NaN
#pragma unroll
  for (int i = 0; i < kPlanes; i++) {
    planes[i] = to_e5m2_pair(values[0], values[1]);
#pragma unroll
    for (int j = 0; j < 2; j++)
      values[j] = (values[j] - from_e5m2(planes[i] >> 8 * j & 0xff)) * kSecondFactor + infinite[j];
  }
}

// Add up the products of a number's planes.
__device__ inline float join_planes(float first, float second) { return first + second * (1 / kSecondFactor); }

// Where a column lies in a row. For weights of 4 bits each 32 columns lie as the operand of a product does that is made
// of a word's even numbers, then of its odd ones.
template <FormatId kOrder>
__device__ inline int packed_place(int column) {
  if constexpr (kOrder == FormatId::kInt4)
    return column / 32 * 32 + column / 8 % 2 * 16 + column % 8 / 2 * 4 + column % 2 * 2 + column / 16 % 2;
  return column / 128 * 128 + column % 8 / 2 * 32 + column % 128 / 16 * 4 + column / 8 % 2 * 2 + column % 2;
}

// Write two numbers to a place in the planes, one behind the other; size: bytes of a plane.
__device__ inline void write_planes(void* planes, long size, long place, unsigned pair) {
  unsigned short numbers[kPlanes];
  split_pair(pair, numbers);
  char* to = static_cast<char*>(planes) + place;
#pragma unroll
  for (int i = 0; i < kPlanes; i++) *reinterpret_cast<unsigned short*>(to + i * size) = numbers[i];
}

// Write two columns, the first of them even, of a row that begins at a place.
template <FormatId kOrder>
__device__ inline void write_columns(void* planes, long size, long row, int column, unsigned pair) {
  const long place = row + packed_place<kOrder>(column);
  if constexpr (kOrder == FormatId::kFp8) {
    write_planes(planes, size, place, pair);
  } else {
    unsigned short numbers[kPlanes];
    split_pair(pair, numbers);
    char* to = static_cast<char*>(planes) + place;
#pragma unroll
    for (int i = 0; i < kPlanes; i++)
      to[i * size] = static_cast<char>(numbers[i]), to[i * size + 2] = static_cast<char>(numbers[i] >> 8);
  }
}

}  // namespace blink
