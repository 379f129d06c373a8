// SPDX-License-Identifier: Apache-2.0
// What the two GEMMs of a few decoding rows with their experts share. One warp of a block copies weight rows to a
// pipeline of stages in shared memory; the others split k and multiply. To the matrix instruction a row of the batch
// always is the same row, whose activations are zero if it has not chosen the expert.
#pragma once

#include "kernels/common/quantized.cuh"
#include "kernels/gemm/gemv.cuh"
#include "kernels/moe/moe_routing.cuh"

namespace blink {

constexpr int kMaxMoeRows = 8;

// Weights of experts, as formats/experts.py has them: of kFp8 each row has a scale; where they are grouped, so has each
// kGroup of k, as a word that quantized.cuh describes. 32 bytes of 4 bits hold 64 k, the first 32 in the low halves.
template <FormatId kFormat>
constexpr int kBits = kFormat == FormatId::kBf16   ? 16
                      : kFormat == FormatId::kInt4 ? 4
                                                   : 8;

// Words of a weight row of kK.
template <FormatId kFormat, bool kGrouped, int kK>
constexpr int kRowWords = kFormat == FormatId::kBf16 ? 0
                          : kGrouped                 ? kK / kGroup
                                                     : 1;

// A pipeline of stages, each of kRows rows of kK.
template <int kRows, int kK, int kStages>
struct Ring {
  static constexpr int stages = kStages;
  static_assert(kK % 32 == 0);

  // Not padded against bank conflicts: neighbours come by one copy.
  alignas(128) Bf16 rows[kStages][kRows][kK];
  alignas(8) Barrier full[kStages], empty[kStages];

  // What the copying thread does before the block's first __syncthreads(); as many warps read.
  __device__ void start(int warps) {
    for (int i = 0; i < kStages; i++) initialize(full[i], 1), initialize(empty[i], warps);
    publish_barriers();
  }

  // Begin to fill the stage of this turn with so many rows and bytes beside them, once it is free.
  __device__ void begin(int turn, int num_rows, int other_bytes = 0) {
    if (turn >= kStages) wait(empty[turn % kStages], (turn / kStages - 1) % 2);
    expect(full[turn % kStages], num_rows * kK * 2 + other_bytes);
  }

  // Copy so many rows, which are neighbours.
  __device__ void copy_weights(int turn, int row, const Bf16* from, int count) {
    copy_once(rows[turn % kStages][row], from, count * kK * 2, full[turn % kStages]);
  }

  // The same of what other blocks read as well.
  __device__ void copy_inputs(int turn, int row, const Bf16* from, int count) {
    copy(rows[turn % kStages][row], from, count * kK * 2, full[turn % kStages]);
  }

  __device__ void wait_full(int turn) { wait(full[turn % kStages], turn / kStages % 2); }

  // Let a reading warp leave a stage.
  __device__ void leave(int turn) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty[turn % kStages]);
  }
};

// Multiply 8 weight rows with all rows' activations. Lane l has of x: row l / 4, of each 32 k the 8 from l % 4 * 8 on;
// it gets the sums of that row with weight rows l % 4 * 2 and the next. Half of the instruction's rows would be free:
// they take every second pair of k.
template <int kSteps>
__device__ inline void multiply_rows(const Bf16* weights, int pitch, const Vec16 (&x)[kSteps], float (&sums)[2]) {
  const int lane = threadIdx.x % 32;
  const Bf16* from = weights + lane / 4 * pitch + lane % 4 * 8;
  float first[4] = {}, second[4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    const Vec16 a = x[step], b = *reinterpret_cast<const Vec16*>(from + step * 32);
    multiply_add(first, a.x, a.z, a.y, a.w, b.x, b.y);
    multiply_add(second, a.x, a.z, a.y, a.w, b.z, b.w);
  }
  sums[0] = first[0] + second[2];
  sums[1] = first[1] + second[3];
}

// Multiply 16 bytes of a lane with as many of its k: sums of even and odd words, the first those of the instruction's
// rows 0 to 7, the others those of its rows 8 to 15.
template <FormatId kFormat>
__device__ inline void multiply_vector(Vec16 weights, const Vec16* x, unsigned group, float (&sums)[2][4]) {
  const unsigned words[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned pairs[kWordSteps<kFormat>][2];
    dequantize_half<kFormat>(words[i], group, pairs);
    const Vec16 a = x[i / 2];
    if constexpr (kFormat == FormatId::kInt4) {  // all low halves come before the high ones
      const Vec16 c = x[2 + i / 2];
      multiply_add_halves(sums[i % 2], a.x, a.z, a.y, a.w, pairs[0][0], pairs[1][0]);
      multiply_add_halves(sums[i % 2], c.x, c.z, c.y, c.w, pairs[0][1], pairs[1][1]);
    } else {
      multiply_add_halves(sums[i % 2], a.x, a.z, a.y, a.w, pairs[0][0], pairs[0][1]);
    }
  }
}

// The same with quantized weights and x in f16. words: the groups', of which kPitch rows lie side by side.
template <FormatId kFormat, bool kGrouped, int kPitch, int kSteps>
__device__ inline void multiply_quantized_rows(const Bf16* weights, int pitch, const Vec16 (&x)[kSteps],
                                               const unsigned* words, float (&sums)[2]) {
  constexpr int vector = 16 / kBits<kFormat>;  // of x, for which a lane has one of weights
  constexpr int group = kGrouped ? kGroup / 32 : kSteps;
  static_assert(kSteps % group == 0 && group % vector == 0);
  const int lane = threadIdx.x % 32;
  const Bf16* from = weights + lane / 4 * pitch + lane % 4 * 8;
  sums[0] = sums[1] = 0;
#pragma unroll
  for (int first = 0; first < kSteps; first += group, words += kPitch) {
    float parts[2][4] = {};
    const unsigned zero = kFormat == FormatId::kInt4 ? words[lane / 4] : 0;
#pragma unroll
    for (int step = first; step < first + group; step += vector)
      multiply_vector<kFormat>(*reinterpret_cast<const Vec16*>(from + step / vector * 32), x + step, zero, parts);
#pragma unroll
    for (int i = 0; i < 2; i++)
      sums[i] += (parts[0][i] + parts[1][i + 2]) * group_scale<kFormat>(words[lane % 4 * 2 + i]);
  }
}

// Make f16 of the activations that four lanes have of a row, times the power of 2 that brings the largest of them to
// 2^14; return its inverse.
template <int kSteps>
__device__ inline float scale_vectors(Vec16 (&x)[kSteps]) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kSteps; i++)
    for (unsigned pair : {x[i].x, x[i].y, x[i].z, x[i].w}) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
  largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 2));
  const HalfScale scale(largest);
#pragma unroll
  for (int i = 0; i < kSteps; i++)
    x[i] = {scale.convert(x[i].x), scale.convert(x[i].y), scale.convert(x[i].z), scale.convert(x[i].w)};
  return scale.inverse;
}

// A lane's k of its vector i of x, from the warp's first on.
template <FormatId kFormat>
__device__ inline int vector_k(int i) {
  const int part = threadIdx.x % 4;
  if constexpr (kFormat == FormatId::kBf16) return i * 32 + part * 8;
  if constexpr (kFormat == FormatId::kInt4)
    return i / 4 * 128 + part / 2 * 64 + part % 2 * 16 + i % 4 / 2 * 32 + i % 2 * 8;
  return i / 2 * 64 + part * 16 + i % 2 * 8;
}

// Bring a lane's k into the order in which those of the weights leave their words.
template <FormatId kFormat>
__device__ inline Vec16 arrange(Vec16 x) {
  if constexpr (kFormat != FormatId::kInt4) return x;
  return {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
          __byte_perm(x.z, x.w, 0x7632)};
}

}  // namespace blink
