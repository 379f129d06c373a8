// SPDX-License-Identifier: Apache-2.0
// The softmax of scores that a warpgroup's MMAs leave in registers, tile after tile of keys.
#pragma once

#include "kernels/prefill/tiles.cuh"

namespace blink {

constexpr float kNoScore = -1e30f;  // below every score, and finite: differences are never NaN

// The last keys that are seen: by a thread's two rows of sums, and by the warpgroup's first row.
struct LastKeys {
  int of[2], least;
};

__device__ inline int last_key(const PromptItem& item, int query) {
  return min(item.first_position + query, item.end_key - 1);
}

struct PromptSums {
  float best[2] = {kNoScore, kNoScore};  // of a row's scores so far
  float total[2] = {};                   // of exponentials, in this thread's columns
};

// Make a thread's scores of a tile weights; return by how much what was attended before shrinks. A thread has half as
// many scores as the tile has keys.
template <int kCount>
__device__ inline float2 weigh(float (&scores)[kCount], PromptSums& sums, const LastKeys& last, int first_key,
                               float scale) {
  if (first_key + 2 * kCount - 1 > last.least) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      if (key > last.of[i / 2 % 2]) scores[i] = __uint_as_float(0xff800000u);
    }
  }
  float best[2] = {sums.best[0], sums.best[1]}, shrink[2], shift[2];
#pragma unroll
  for (int i = 0; i < kCount; i++) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], scores[i]);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    best[row] = fmaxf(best[row], __shfl_xor_sync(~0u, best[row], 1));
    best[row] = fmaxf(best[row], __shfl_xor_sync(~0u, best[row], 2));
    shift[row] = best[row] * scale;
    shrink[row] = exp2_fast((sums.best[row] - best[row]) * scale);
    sums.total[row] *= shrink[row], sums.best[row] = best[row];
  }
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    scores[i] = exp2_fast(scores[i] * scale - shift[i / 2 % 2]);
    sums.total[i / 2 % 2] += scores[i];
  }
  return {shrink[0], shrink[1]};
}

// The weights as operands of the next GEMM.
template <int kCount>
__device__ inline void round_weights(const float (&scores)[kCount], unsigned (&weights)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; i++) weights[i] = to_bf16_pair(scores[2 * i], scores[2 * i + 1]);
}

}  // namespace blink
