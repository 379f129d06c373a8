// SPDX-License-Identifier: Apache-2.0
// Activations as FP8 that keep bf16's precision: each number is the sum of three e5m2, each what the one before leaves,
// rounded, and scaled to the same range. Who writes activations writes their planes, [kPlanes, rows, columns] in the
// weights' order (quantized.cuh); products multiply them as they are.
//
// Of numbers below 2^19.8 that is all bits down to 2^-19: from 2^-12 on all that bf16 has. What is larger becomes the
// largest; what is not finite becomes NaN.
#pragma once

#include "ptx.cuh"

namespace blink {

constexpr int kPlanes = 3;
constexpr float kPlanesDivisor = 16;                   // of all: those before a norm's rate may be large
constexpr float kSecondFactor = 8, kThirdFactor = 16;  // what three bits leave of eight is 2^-3 of it, then 2^-7

__device__ inline unsigned short to_e5m2_pair(float low, float high) {
  unsigned short pair = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// An e5m2 is the first byte of an f16.
__device__ inline float from_e5m2(unsigned byte) {
  float value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(byte << 8));
  return value;
}

// Two bf16 as two numbers of each plane.
__device__ inline void split_pair(unsigned pair, unsigned short (&planes)[kPlanes]) {
  float values[2] = {low_float(pair) * (1 / kPlanesDivisor), high_float(pair) * (1 / kPlanesDivisor)};
  const float infinite[2] = {values[0] - values[0], values[1] - values[1]};  // 0, or NaN
#pragma unroll
  for (int i = 0; i < kPlanes; i++) {
    planes[i] = to_e5m2_pair(values[0], values[1]);
#pragma unroll
    for (int j = 0; j < 2; j++)
      values[j] =
          (values[j] - from_e5m2(planes[i] >> 8 * j & 0xff)) * (i == 0 ? kSecondFactor : kThirdFactor) + infinite[j];
  }
}

// Add up the products of a number's planes.
__device__ inline float join_planes(float first, float second, float third) {
  const float rest = second + third * (1 / kThirdFactor);
  return first + rest * (1 / kSecondFactor);
}

// Where a column lies in a row.
__device__ inline int packed_place(int column) {
  return column / 128 * 128 + column % 8 / 2 * 32 + column % 128 / 16 * 4 + column / 8 % 2 * 2 + column % 2;
}

// Write two columns, the first of them even, to a place in the planes; size: bytes of a plane.
__device__ inline void write_planes(void* planes, long size, long place, unsigned pair) {
  unsigned short numbers[kPlanes];
  split_pair(pair, numbers);
  char* to = static_cast<char*>(planes) + place;
#pragma unroll
  for (int i = 0; i < kPlanes; i++) *reinterpret_cast<unsigned short*>(to + i * size) = numbers[i];
}

}  // namespace blink
