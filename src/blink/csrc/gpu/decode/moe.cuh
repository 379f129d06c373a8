// SPDX-License-Identifier: Apache-2.0
// What the two products of a few decoding rows with their experts share. One warp of a block copies weight rows to a
// ring of stages in shared memory; the others split k and multiply. To the matrix instruction a row of the batch always
// is the same row, whose activations are zero if it has not chosen the expert.
#pragma once

#include "gemv.cuh"
#include "moe_routing.cuh"
#include "quantized.cuh"

namespace blink {

constexpr int kMaxMoeRows = 8;

// A ring of stages, each of kRows rows of kK.
template <int kRows, int kK, int kStages>
struct Ring {
  static constexpr int stages = kStages,
                       pitch = kK + 32;  // against bank conflicts: 64 bytes of 8 rows are read at once
  static_assert(kK % 32 == 0);

  alignas(128) Bf16 rows[kStages][kRows][pitch];
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

  __device__ void copy_weight(int turn, int row, const Bf16* from) {
    copy_once(rows[turn % kStages][row], from, kK * 2, full[turn % kStages]);
  }

  // Copy what other blocks read as well.
  __device__ void copy_input(int turn, int row, const Bf16* from) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(rows[turn % kStages][row])),
                 "l"(from), "r"(kK * 2), "r"(shared_address(&full[turn % kStages]))
                 : "memory");
#endif
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

// The same with weights in FP8, in their usual order, and x in f16. Of each 64 k a lane has 16, two vectors of x.
template <int kSteps>
__device__ inline void multiply_fp8_rows(const Bf16* weights, int pitch, const Vec16 (&x)[kSteps], float (&sums)[2]) {
  static_assert(kSteps % 2 == 0);
  const int lane = threadIdx.x % 32;
  const Bf16* from = weights + lane / 4 * pitch + lane % 4 * 8;
  float parts[2][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    const Vec16 b = *reinterpret_cast<const Vec16*>(from + step / 2 * 32);
    const unsigned words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Vec16 a = x[step + i / 2];
      unsigned pairs[1][2];
      unpack_half<Format::kFp8>(words[i], 0, pairs);
      multiply_add_halves(parts[i % 2], a.x, a.z, a.y, a.w, pairs[0][0], pairs[0][1]);
    }
  }
  sums[0] = parts[0][0] + parts[1][2];
  sums[1] = parts[0][1] + parts[1][3];
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
template <bool kFp8>
__device__ inline int vector_k(int i) {
  const int part = threadIdx.x % 4;
  return kFp8 ? i / 2 * 64 + part * 16 + i % 2 * 8 : i * 32 + part * 8;
}

}  // namespace blink
