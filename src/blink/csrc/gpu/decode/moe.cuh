// SPDX-License-Identifier: Apache-2.0
// What the two products of a few decoding rows with their experts share. One warp of a block copies weight rows to a
// ring of stages in shared memory; the others split k and multiply. To the matrix instruction a row of the batch always
// is the same row, whose activations are zero if it has not chosen the expert.
#pragma once

#include "gemv.cuh"
#include "moe_routing.cuh"

namespace blink {

// A stage of the ring: kRows weight rows of kK, or of a part of them.
template <int kRows, int kK, int kStages>
struct WeightRing {
  static constexpr int rows = kRows, k = kK, stages = kStages;
  static constexpr int pitch = kK + 32;  // against bank conflicts: a warp's load takes 64 bytes of each of 8 rows
  static_assert(kRows % 8 == 0 && kK % 32 == 0);

  alignas(128) Bf16 weights[kStages][kRows][pitch];
  alignas(8) Barrier full[kStages], empty[kStages];

  // What the copying thread does before the block's first __syncthreads(); as many warps multiply.
  __device__ void start(int warps) {
    for (int i = 0; i < kStages; i++) initialize(full[i], 1), initialize(empty[i], warps);
    publish_barriers();
  }

  // Let the copying thread fill a stage, once it is free; `find` gives the weights of a row of the stage.
  template <class Find>
  __device__ void fill(int turn, Find find) {
    const int slot = turn % kStages;
    if (turn >= kStages) wait(empty[slot], (turn / kStages - 1) % 2);
    expect(full[slot], kRows * kK * 2);
#pragma unroll
    for (int row = 0; row < kRows; row++) copy_once(weights[slot][row], find(row), kK * 2, full[slot]);
  }

  __device__ void wait_full(int turn) { wait(full[turn % kStages], turn / kStages % 2); }

  // Let a multiplying warp leave a stage.
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

}  // namespace blink
